"""`kvray simulate`: a trace or a log on a fleet, once for each routing policy, in virtual time.

Owns: reading what the options name, the order of requests, speed and runs, and what the user sees.
Does not: simulate (cluster.simulate).
Invariants: wrong options or files are one line and exit code 2 before anything runs; every policy gets the same
requests at the same times; with --json nothing else goes to standard output.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.progress import Progress

from cluster.bench.plot import require_matplotlib
from cluster.core.errors import ConfigError
from cluster.core.hashing import ChunkHash
from cluster.simulate.fleet_load import speed_for_utilisation
from cluster.simulate.fleet_plot import draw_fleet
from cluster.simulate.fleet_report import FleetReport, clairvoyant_bound, fleet_table, make_fleet_report
from cluster.simulate.fleet_simulation import FleetSettings, FleetSimulation, trace_hashes
from cluster.simulate.fleet_sizing import FleetSize, sizes_table, smallest_fleet
from cluster.simulate.ideal_hits import ideal_block_hits, ideal_hits
from cluster.simulate.mooncake_trace import TraceRequest
from cluster.simulate.openai_log import LogRequests, read_log
from cluster.simulate.policy_lineup import BASELINE, OURS, PolicyEntry, chosen_policies
from cluster.simulate.recorded_trace import read_requests
from cluster.simulate.trace_variants import at_speed, with_cold_share
from cluster.simulate_options import FleetOptions
from cluster.tokenizer import Tokenizer

_WIDTH = 140  # of the table, in files and pipes
_LOG_POLICIES = f"{OURS},{BASELINE},round_robin"


def run_fleet(options: FleetOptions, *, as_json: bool) -> int:
    options.check()
    entries = chosen_policies(options.policy or ("all" if options.log is None else _LOG_POLICIES))
    if options.png is not None:
        require_matplotlib()
    requests, log = _requests(options)
    settings = options.settings(requests[0].segment_tokens)
    hashes = trace_hashes(requests)
    speed = _speed(options, requests, settings, hashes)
    requests = at_speed(requests, speed)
    console = Console(stderr=True)
    reports = [run_policy(requests, settings, entry, hashes, console) for entry in entries]
    sizes = _sizes(options, requests, settings, entries, hashes)
    replica = settings.replica
    hits = ideal_hits(requests)
    bound = clairvoyant_bound(requests, hits, settings.replicas, replica.step_time, replica.token_budget)
    tokens = sum(request.prompt_tokens for request in requests)
    ideal = {
        "ideal_hit_rate": sum(hits) / tokens,
        "ideal_block_hit_rate": ideal_block_hits(requests),
        "clairvoyant_mean_ttft_s": bound,
    }
    if options.png is not None:
        title = f"{options.source.name}, {settings.replicas} replicas, speed {speed:.3g}"
        draw_fleet(reports, bound, title, options.png)
    if as_json:
        found = {"requests": len(requests), "speed": speed, **ideal, "policies": [one.to_json() for one in reports]}
        if log is not None:
            found |= {"output_lengths": dict(log.lengths), "parts_without_text": log.left_out}
        if options.ttft_target is not None:
            found |= {"ttft_target_s": options.ttft_target, "sizes": [size.to_json() for size in sizes]}
        print(json.dumps(found))
        return 0
    _print_tables(options, reports, sizes, bound)
    _print_line(
        f"{len(requests):,} requests, speed {speed:.4g}; one infinite cache would hit "
        f"{ideal['ideal_hit_rate']:.2%} of tokens, {ideal['ideal_block_hit_rate']:.2%} of blocks"
    )
    if log is not None:
        _print_line(_lengths_line(log))
    return 0


def _print_tables(
    options: FleetOptions, reports: Sequence[FleetReport], sizes: Sequence[FleetSize], bound: float
) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    console.print(fleet_table(reports, bound))
    if options.ttft_target is not None:
        console.print(sizes_table(sizes, options.ttft_target))


def _print_line(line: str) -> None:
    Console().print(line, highlight=False, soft_wrap=True)


def _requests(options: FleetOptions) -> tuple[list[TraceRequest], LogRequests | None]:
    if options.trace is not None:
        requests = read_requests(options.trace, seed=options.seed, limit=options.limit)
        log = None
    else:
        assert options.log is not None and options.tokenizer is not None
        with Console(stderr=True).status("tokenising the log"):
            log = read_log(
                options.log,
                Tokenizer.from_dir(options.tokenizer),
                block_tokens=options.chunk_tokens,
                default_output=options.output_tokens,
                seed=options.seed,
                limit=options.limit,
            )
        if not log.timed and options.rate is None and options.load is None:
            raise ConfigError(f"{options.log.name} has no timestamps: say with --rate or --load how fast requests come")
        requests = log.requests
    if options.cold_share is not None:
        requests = with_cold_share(requests, options.cold_share, seed=options.seed)
    return requests, log


def _sizes(
    options: FleetOptions,
    requests: Sequence[TraceRequest],
    settings: FleetSettings,
    entries: Sequence[PolicyEntry],
    hashes: dict[str, tuple[ChunkHash, ...]],
) -> list[FleetSize]:
    """Each policy's search begins where the one before ended."""
    sizes: list[FleetSize] = []
    start = settings.replicas
    for entry in entries if options.ttft_target is not None else ():

        def run(replicas: int, entry: PolicyEntry = entry) -> FleetReport:
            return run_policy(requests, replace(settings, replicas=replicas), entry, hashes, Console(stderr=True))

        assert options.ttft_target is not None
        sizes.append(smallest_fleet(entry.name, options.ttft_target, run, start))
        start = sizes[-1].replicas or start
    return sizes


def _lengths_line(log: LogRequests) -> str:
    line = (
        f"lengths of answers: {log.lengths['usage']:,} from usage, {log.lengths['max_tokens']:,} from max_tokens (at "
        f"most), {log.lengths['default']:,} from --output-tokens"
    )
    return f"{line}; {log.left_out:,} parts of messages are no text and count as nothing" if log.left_out else line


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
