"""`kvray simulate`: a trace on a fleet, once for each routing policy, in virtual time.

Owns: reading what the options name, the order of trace, speed and runs, and what the user sees.
Does not: simulate (cluster.simulate).
Invariants: wrong options or files are one line and exit code 2 before anything runs; every policy gets the same
requests at the same times; with --json nothing else goes to standard output.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from cluster.bench.plot import require_matplotlib
from cluster.core.errors import ConfigError
from cluster.core.hashing import ChunkHash
from cluster.simulate.fleet_load import speed_for_utilisation
from cluster.simulate.fleet_plot import draw_fleet
from cluster.simulate.fleet_report import FleetReport, clairvoyant_bound, fleet_table, make_fleet_report
from cluster.simulate.fleet_simulation import Death, FleetSettings, FleetSimulation, trace_hashes
from cluster.simulate.ideal_hits import ideal_block_hits, ideal_hits
from cluster.simulate.mooncake_trace import TRACE_BLOCK, TraceRequest, read_trace
from cluster.simulate.policy_lineup import BASELINE, PolicyEntry, chosen_policies
from cluster.simulate.scaled_replica import ReplicaSettings
from cluster.simulate.step_times import EXAMPLE, EXAMPLE_KV_TOKENS, read_step_time
from cluster.simulate.trace_variants import at_speed, with_cold_share

_WIDTH = 130  # of the table, in files and pipes


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """speed, rate (requests per second), load (utilisation under least_uncached): one of them, or none (speed 1)."""

    trace: Path
    replicas: int
    policy: str
    speed: float | None
    rate: float | None
    load: float | None
    limit: int | None
    cold_share: float | None
    kv_tokens: int | None
    event_lag_ms: float
    kill: str | None
    step_time: Path | None
    token_budget: int
    max_num_seqs: int
    prefix_first: bool
    ageing_s: float
    hold_back: bool
    seed: int
    png: Path | None

    def settings(self) -> FleetSettings:
        """ConfigError names the option."""
        given = {"speed": self.speed, "rate": self.rate, "load": self.load}
        if sum(value is not None for value in given.values()) > 1:
            raise ConfigError("--speed, --rate and --load all say how fast requests arrive; give one")
        for name, value in given.items():
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name} must be a number above 0")
        if self.load is not None and self.load >= 1:
            raise ConfigError("--load is a share of the replicas' time, below 1")
        if self.cold_share is not None and not 0 < self.cold_share <= 1:
            raise ConfigError("--cold-share must be above 0 and at most 1")
        kv_tokens = EXAMPLE_KV_TOKENS if self.kv_tokens is None else self.kv_tokens
        for name, count in (("limit", self.limit), ("kv-tokens", kv_tokens // TRACE_BLOCK)):
            if count is not None and count < 1:
                raise ConfigError(f"--{name} must be at least {1 if name == 'limit' else TRACE_BLOCK}")
        settings = FleetSettings(
            replicas=self.replicas,
            replica=ReplicaSettings(
                kv_tokens=kv_tokens,
                step_time=EXAMPLE if self.step_time is None else read_step_time(self.step_time),
                token_budget=self.token_budget,
                max_num_seqs=self.max_num_seqs,
                prefix_first=self.prefix_first,
                ageing_s=self.ageing_s,
                hold_back=self.hold_back,
            ),
            event_lag_s=self.event_lag_ms / 1000,
            death=None if self.kill is None else parse_kill(self.kill),
            seed=self.seed,
        )
        settings.check()
        return settings


def parse_kill(text: str) -> Death:
    found = re.fullmatch(r"(\d+)@(\d+(?:\.\d+)?)", text)
    if found is None:
        raise ConfigError(f"--kill {text!r} is not REPLICA@SECONDS, such as 3@120")
    return Death(replica=int(found[1]), at_s=float(found[2]))


def run_fleet(options: FleetOptions, *, as_json: bool) -> int:
    settings, entries = options.settings(), chosen_policies(options.policy)
    if options.png is not None:
        require_matplotlib()
    requests = read_trace(options.trace, seed=options.seed, limit=options.limit)
    if options.cold_share is not None:
        requests = with_cold_share(requests, options.cold_share, seed=options.seed)
    hashes = trace_hashes(requests)
    speed = _speed(options, requests, settings, hashes)
    requests = at_speed(requests, speed)
    reports = [run_policy(requests, settings, entry, hashes, Console(stderr=True)) for entry in entries]
    replica = settings.replica
    bound = clairvoyant_bound(requests, settings.replicas, replica.step_time, replica.token_budget)
    tokens = sum(request.prompt_tokens for request in requests)
    ideal = {
        "ideal_hit_rate": sum(ideal_hits(requests)) / tokens,
        "ideal_block_hit_rate": ideal_block_hits(requests),
        "clairvoyant_mean_ttft_s": bound,
    }
    if options.png is not None:
        title = f"{options.trace.name}, {settings.replicas} replicas, speed {speed:.3g}"
        draw_fleet(reports, bound, title, options.png)
    if as_json:
        print(json.dumps({"speed": speed, **ideal, "policies": [report.to_json() for report in reports]}))
        return 0
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    console.print(fleet_table(reports, bound))
    console.print(
        f"{len(requests):,} requests, speed {speed:.4g}; one infinite cache would hit "
        f"{ideal['ideal_hit_rate']:.2%} of tokens, {ideal['ideal_block_hit_rate']:.2%} of blocks",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def run_policy(
    requests: Sequence[TraceRequest],
    settings: FleetSettings,
    entry: PolicyEntry,
    hashes: dict[str, tuple[ChunkHash, ...]],
    console: Console,
) -> FleetReport:
    started = time.perf_counter()
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(entry.name, total=len(requests))
        simulation = FleetSimulation(
            requests, settings, entry, hashes=hashes, on_progress=lambda count: progress.update(bar, completed=count)
        )
        result = simulation.run()
    return make_fleet_report(entry.name, result, wall_s=time.perf_counter() - started)


def _speed(
    options: FleetOptions,
    requests: Sequence[TraceRequest],
    settings: FleetSettings,
    hashes: dict[str, tuple[ChunkHash, ...]],
) -> float:
    if options.speed is not None:
        return options.speed
    if options.rate is None and options.load is None:
        return 1.0
    seconds = requests[-1].arrival_s - requests[0].arrival_s
    if seconds <= 0.0:
        raise ConfigError("a rate needs requests that arrive at different times; give --speed instead")
    if options.rate is not None:
        return options.rate * seconds / len(requests)
    assert options.load is not None
    (baseline,) = chosen_policies(BASELINE)
    console = Console(stderr=True)

    def utilisation(speed: float) -> float:
        return run_policy(at_speed(requests, speed), settings, baseline, hashes, console).utilisation

    return speed_for_utilisation(options.load, utilisation)
