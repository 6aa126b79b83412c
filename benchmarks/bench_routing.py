"""Routing policies on traces in the Mooncake format: TTFT against least uncached tokens and published defaults.

    python -m benchmarks.bench_routing TRACE... [--quick] [--half second] [--json FILE]

For each trace, cache size and utilisation the speed is found at which least uncached tokens runs so busy (seed 0, no
lag); then every policy runs at that speed with every seed and event lag; one that hears no events runs once for all
lags, because it would do the same again. Parameters of ours are tuned on the first half of each trace and reported on
the second (`--half`).

Owns: the grid, the comparison, the table.
Does not: simulate (cluster.simulate).
Invariants: every policy of a row gets the same requests; nothing is left out of a mean but what was shed, which is
counted beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.core.hashing import ChunkHash
from cluster.simulate.fleet_load import speed_for_utilisation
from cluster.simulate.fleet_report import FleetReport, clairvoyant_bound, make_fleet_report, mean_alone
from cluster.simulate.fleet_simulation import FleetSettings, FleetSimulation, trace_hashes
from cluster.simulate.ideal_hits import ideal_hits
from cluster.simulate.mooncake_trace import TraceRequest, read_trace
from cluster.simulate.policy_lineup import BASELINE, LINEUP, OURS, Knowledge, PolicyEntry, chosen_policies
from cluster.simulate.pooled_hits import farthest_hits, lru_hits
from cluster.simulate.scaled_replica import ReplicaSettings
from cluster.simulate.step_times import EXAMPLE
from cluster.simulate.trace_variants import at_speed
from router.estimated_ttft import TtftParameters

DIVERGES_S = 60.0  # a policy whose mean is beyond this in one seed is not run with the others
_START = {"conversation": 2.3, "synthetic": 2.3}


@dataclass(frozen=True, slots=True)
class Setting:
    trace: str
    kv_tokens: int
    load: float
    lag_s: float


def half_of(requests: list[TraceRequest], half: str) -> list[TraceRequest]:
    middle = len(requests) // 2
    return {"all": requests, "first": requests[:middle], "second": requests[middle:]}[half]


def run_one(
    requests: Sequence[TraceRequest],
    entry: PolicyEntry,
    hashes: dict[str, tuple[ChunkHash, ...]],
    *,
    kv_tokens: int,
    lag_s: float,
    seed: int,
    parameters: TtftParameters | None = None,
) -> FleetReport:
    began = time.perf_counter()
    settings = FleetSettings(
        replica=ReplicaSettings(kv_tokens=kv_tokens, step_time=EXAMPLE), event_lag_s=lag_s, seed=seed
    )
    result = FleetSimulation(requests, settings, entry, hashes=hashes, parameters=parameters).run()
    return make_fleet_report(entry.name, result, wall_s=time.perf_counter() - began)


def run_setting(
    setting: Setting,
    speed: float,
    traces: Sequence[list[TraceRequest]],
    entries: Sequence[PolicyEntry],
    parameters: TtftParameters | None,
) -> list[dict[str, Any]]:
    """One row per policy: means over the seeds, which number the `traces`."""
    reports: dict[str, list[FleetReport]] = {}
    bounds = []
    for seed, trace in enumerate(traces):
        requests = at_speed(trace, speed)
        hashes = trace_hashes(requests)
        bounds.append(clairvoyant_bound(requests, ideal_hits(requests), 8, EXAMPLE, 2048))
        for entry in entries:
            known = reports.setdefault(entry.name, [])
            if known and known[0].ttft is not None and known[0].ttft.mean > DIVERGES_S:
                continue
            report = run_one(
                requests,
                entry,
                hashes,
                kv_tokens=setting.kv_tokens,
                lag_s=setting.lag_s,
                seed=seed,
                parameters=parameters if entry.name == OURS else None,
            )
            known.append(report)
    return [row(setting, speed, name, found, statistics.fmean(bounds)) for name, found in reports.items()]


def at_another_lag(rows: Sequence[dict[str, Any]], lag_s: float) -> list[dict[str, Any]]:
    """The rows of policies that hear no events, which are the same at this lag."""
    deaf = {entry.name for entry in LINEUP if entry.knows in (Knowledge.HISTORY, Knowledge.NOTHING)}
    return [{**one, "lag_s": lag_s} for one in rows if one["policy"] in deaf]


def in_order(rows: Sequence[dict[str, Any]], entries: Sequence[PolicyEntry]) -> list[dict[str, Any]]:
    places = {entry.name: place for place, entry in enumerate(entries)}
    return sorted(rows, key=lambda one: places[one["policy"]])


def row(setting: Setting, speed: float, name: str, reports: Sequence[FleetReport], bound_s: float) -> dict[str, Any]:
    ttfts = [report.ttft for report in reports if report.ttft is not None]
    means = [ttft.mean for ttft in ttfts]
    return {
        "trace": setting.trace,
        "kv_tokens": setting.kv_tokens,
        "load": setting.load,
        "lag_s": setting.lag_s,
        "speed": speed,
        "policy": name,
        "seeds": len(reports),
        "hit": statistics.fmean(report.hit_rate or 0.0 for report in reports),
        "mean": statistics.fmean(means),
        "noise": statistics.stdev(means) if len(means) > 1 else None,
        "p50": statistics.fmean(ttft.p50 for ttft in ttfts),
        "p90": statistics.fmean(ttft.p90 for ttft in ttfts),
        "p99": statistics.fmean(ttft.p99 for ttft in ttfts),
        "by_seed": {name: [getattr(ttft, name) for ttft in ttfts] for name in ("mean", "p90", "p99")},
        "itl": statistics.fmean(report.inter_token.mean for report in reports if report.inter_token is not None),
        "shed": sum(report.shed for report in reports),
        "hotspot": statistics.fmean(report.hotspot for report in reports),
        "utilisation": statistics.fmean(report.utilisation for report in reports),
        "decisions_per_s": statistics.fmean(report.decisions_per_s for report in reports),
        "wall_s": statistics.fmean(report.wall_s for report in reports),
        "bound": bound_s,
    }


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    lag = f"{first['lag_s'] * 1000:.0f} ms"
    print(
        f"\n### {first['trace']}, {first['kv_tokens'] // 1000} k tokens, load {first['load']:.0%}, event lag {lag} "
        f"(speed {first['speed']:.3f}, {first['seeds']} seeds, clairvoyant bound {first['bound']:.3f} s)\n"
    )
    print("| policy | hit | mean | vs base | p50 | p90 | vs base | p99 | per token | shed | hotspot | util | dec/s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    base = next((one for one in rows if one["policy"] == BASELINE), first)
    for one in rows:
        noise = "" if one["noise"] is None else f" ± {one['noise']:.3f}"
        print(
            f"| {one['policy']} | {one['hit']:.1%} | {one['mean']:.3f}{noise} | {one['mean'] / base['mean'] - 1:+.1%} "
            f"| {one['p50']:.3f} | {one['p90']:.3f} | {one['p90'] / base['p90'] - 1:+.1%} | {one['p99']:.3f} "
            f"| {one['itl']:.4f} | {one['shed']} | {one['hotspot']:.2f} | {one['utilisation']:.0%} "
            f"| {one['decisions_per_s']:,.0f} |",
            flush=True,
        )


def print_limits(trace: Sequence[TraceRequest], setting: Setting) -> None:
    """What the fleet's memory could save as one cache, and the mean if nobody ever waited then."""
    asked = sum(request.prompt_tokens for request in trace)
    for name, count in (("LRU", lru_hits), ("perfect foresight", farthest_hits)):
        hits = count(trace, 8 * setting.kv_tokens)
        mean = mean_alone(trace, hits, EXAMPLE, 2048)
        print(f"one cache of all memory, {name}: hit {sum(hits) / asked:.1%}, mean without any queue {mean:.3f} s")


def speed_of(trace: Sequence[TraceRequest], name: str, kv_tokens: int, load: float) -> float:
    (baseline,) = chosen_policies(BASELINE)
    hashes = trace_hashes(trace)

    def utilisation(speed: float) -> float:
        return run_one(at_speed(trace, speed), baseline, hashes, kv_tokens=kv_tokens, lag_s=0.0, seed=0).utilisation

    return speed_for_utilisation(load, utilisation, _START.get(name, 1.0))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--kv-tokens", type=int, nargs="+", default=[1_000_000, 250_000])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.7, 0.9])
    parser.add_argument("--lags-ms", type=float, nargs="+", default=[0.0, 200.0])
    parser.add_argument("--policy", default="all")
    parser.add_argument("--half", choices=["all", "first", "second"], default="second")
    parser.add_argument("--others", type=float, help="instead of the default of TtftParameters")
    parser.add_argument("--eviction", type=float)
    parser.add_argument("--quick", action="store_true", help="one seed, without longest prefix, which never ends")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    entries = chosen_policies(options.policy)
    seeds = 1 if options.quick else options.seeds
    if options.quick and options.policy == "all":
        entries = tuple(entry for entry in LINEUP if entry.name != "longest_prefix")
    chosen = {name: value for name in ("others", "eviction") if (value := getattr(options, name)) is not None}
    parameters = TtftParameters(**chosen) if chosen else None
    rows: list[dict[str, Any]] = []
    for path in options.traces:
        name = path.stem.removesuffix("_trace")
        traces = [half_of(read_trace(path, seed=seed), options.half) for seed in range(seeds)]
        start = min(trace[0].arrival_s for trace in traces)
        traces = [[one._replace(arrival_s=one.arrival_s - start) for one in trace] for trace in traces]
        for kv_tokens in options.kv_tokens:
            for load in options.loads:
                speed = speed_of(traces[0], name, kv_tokens, load)
                found: list[dict[str, Any]] = []
                for lag_ms in options.lags_ms:
                    setting = Setting(name, kv_tokens, load, lag_ms / 1000)
                    known = at_another_lag(found, setting.lag_s)
                    left = [entry for entry in entries if entry.name not in {one["policy"] for one in known}]
                    found = in_order(known + run_setting(setting, speed, traces, left, parameters), entries)
                    print_rows(found)
                    print_limits(traces[0], setting)
                    rows += found
                    if options.json is not None:
                        options.json.write_text(json.dumps(rows, indent=1))
    worst = max((one["wall_s"] for one in rows if one["mean"] < DIVERGES_S), default=math.nan)
    print(f"\nslowest run of a policy whose queues end: {worst:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
