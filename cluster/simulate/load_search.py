"""load_search: how fast a trace may arrive so that it is a given share of what the replica can do.

How busy an engine is says little about how much more it could do: it steps as long as a single request decodes. So the
load is the arrival rate as a share of the rate at which the same replica finishes the same requests when there are
always some waiting.

    capacity   requests per second of a saturated pass over the whole trace: its beginning, with an empty cache,
               says little about the rest
    speed      load * capacity / the trace's own requests per second

Owns: that pass, and the speed.
Does not: run the simulation itself.
Invariants: deterministic; one bounded pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.core.errors import ConfigError
from cluster.simulate.engine_simulation import EngineSimulation
from cluster.simulate.mooncake_trace import TraceRequest
from cluster.simulate.sim_settings import SimSettings

BACKLOG = 32  # requests that wait at any time in the saturated pass


def speed_for(load: float, requests: Sequence[TraceRequest], settings: SimSettings) -> float:
    """ConfigError when the requests do not come at a rate."""
    seconds = requests[-1].arrival_s - requests[0].arrival_s
    if seconds <= 0.0:
        raise ConfigError("a load needs requests that arrive at different times; give --speed instead")
    return load * capacity(requests, settings) * seconds / len(requests)


def capacity(requests: Sequence[TraceRequest], settings: SimSettings) -> float:
    """Requests per second."""
    result = EngineSimulation(requests, settings, backlog=BACKLOG).run()
    finished = sum(record.finished_s is not None for record in result.log.records.values())
    if not finished:
        raise ConfigError("no request of the trace fits into this replica")
    return finished / result.virtual_s
