"""Small traces and replicas for the simulator's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from cluster.core.step_time import StepTimeModel
from cluster.simulate.engine_simulation import EngineSimulation, SimResult
from cluster.simulate.mooncake_trace import TraceRequest
from cluster.simulate.sim_settings import SimSettings

ROUND_TIMES = StepTimeModel(
    base=1.0, per_prefill_token=0.01, per_prefill_context=0.0, per_decode_seq=0.1, per_decode_context=0.0
)


def request(number: int, arrival_s: float, prompt: int, output: int, *hash_ids: int, segment: int = 8) -> TraceRequest:
    return TraceRequest(number, arrival_s, prompt, output, hash_ids, segment)


def chats(count: int, *, seed: int = 0, rate: float = 1.0, segment: int = 8) -> list[TraceRequest]:
    """Random conversations with a common first segment, whose turns repeat and continue the ones before."""
    rng = random.Random(seed)
    histories: list[tuple[int, ...]] = []
    requests: list[TraceRequest] = []
    now, free = 0.0, 1
    for number in range(count):
        now += rng.expovariate(rate)
        history = rng.choice(histories) if histories and rng.random() < 0.5 else (0,)
        history = history if len(history) < 7 else (0,)
        more = rng.randint(1, 5)
        ids = (*history, *range(free, free + more))
        free += more
        histories.append(ids[:-1])
        prompt = (len(ids) - 1) * segment + rng.randint(1, segment)
        requests.append(TraceRequest(number, now, prompt, rng.randint(1, 60), ids, segment))
    return requests


def simulate(requests: Sequence[TraceRequest], *, engine: dict[str, Any] | None = None, **settings: Any) -> SimResult:
    values = {"block_size": 4, "num_blocks": 200, "step_time": ROUND_TIMES, **settings}
    limits = {"token_budget": 64, "check_invariants": True, "strict_blocks": True, **(engine or {})}
    return EngineSimulation(requests, SimSettings(engine=limits, **values)).run()
