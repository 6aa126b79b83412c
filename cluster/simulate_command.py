"""`kvray simulate`: a trace through one replica's scheduler and KV bookkeeping, in virtual time.

Owns: reading what the options name, the order of trace, variant, speed and run, and what the user sees.
Does not: simulate (cluster.simulate).
Invariants: wrong options or files are one line and exit code 2 before anything runs; with --json nothing else goes to
standard output.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from cluster.core.errors import ConfigError
from cluster.simulate.engine_simulation import EngineSimulation
from cluster.simulate.load_search import speed_for
from cluster.simulate.mooncake_trace import TraceRequest
from cluster.simulate.recorded_trace import read_requests
from cluster.simulate.sim_report import SimReport, make_report, to_lines, to_table
from cluster.simulate.sim_settings import SimSettings
from cluster.simulate.step_times import EXAMPLE, EXAMPLE_KV_TOKENS, read_step_time
from cluster.simulate.trace_variants import at_speed, with_cold_share


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """kv_blocks None: as many as the example's memory holds.  speed, load: one of them, or neither (speed 1).

    engine: further fields of EngineConfig by name; None stands for their default.
    """

    trace: Path
    engine_only: bool
    speed: float | None
    load: float | None
    limit: int | None
    cold_share: float | None
    kv_blocks: int | None
    block_size: int
    step_time: Path | None
    seed: int
    engine: dict[str, Any]

    def check(self) -> None:
        """ConfigError names the option."""
        if not self.engine_only:
            raise ConfigError("this is one replica without a router: --engine-only")
        if self.speed is not None and self.load is not None:
            raise ConfigError("--speed and --load both say how fast requests arrive; give one")
        for name, value in (("speed", self.speed), ("load", self.load)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name} must be a number above 0")
        if self.cold_share is not None and not 0 < self.cold_share <= 1:
            raise ConfigError("--cold-share must be above 0 and at most 1")
        for name, count in (("limit", self.limit), ("kv-blocks", self.kv_blocks), ("block-size", self.block_size)):
            if count is not None and count < 1:
                raise ConfigError(f"--{name} must be at least 1")

    def settings(self) -> SimSettings:
        return SimSettings(
            block_size=self.block_size,
            num_blocks=max(EXAMPLE_KV_TOKENS // self.block_size, 1) if self.kv_blocks is None else self.kv_blocks,
            step_time=EXAMPLE if self.step_time is None else read_step_time(self.step_time),
            engine={name: value for name, value in self.engine.items() if value is not None},
            seed=self.seed,
        )


def run_simulate(options: SimulateOptions, *, as_json: bool) -> int:
    options.check()
    settings = options.settings()
    settings.engine_config()
    requests = read_requests(options.trace, seed=options.seed, limit=options.limit)
    if options.cold_share is not None:
        requests = with_cold_share(requests, options.cold_share, seed=options.seed)
    report = _simulate(requests, options, settings)
    if as_json:
        print(json.dumps(report.to_json()))
        return 0
    console = Console()
    console.print(to_table(report))
    for line in to_lines(report):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def _simulate(requests: Sequence[TraceRequest], options: SimulateOptions, settings: SimSettings) -> SimReport:
    console = Console(stderr=True)
    started = time.perf_counter()
    if options.load is not None:
        with console.status("measuring what the replica can do"):
            speed = speed_for(options.load, requests, settings)
    else:
        speed = 1.0 if options.speed is None else options.speed
    requests = at_speed(requests, speed)
    with _progress(console, len(requests)) as (progress, bar):
        result = EngineSimulation(requests, settings, lambda count: progress.update(bar, completed=count)).run()
    return make_report(requests, result, speed=speed, wall_s=time.perf_counter() - started)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[tuple[Progress, TaskID]]:
    with Progress(console=console, transient=True) as progress:
        yield progress, progress.add_task("requests", total=total)
