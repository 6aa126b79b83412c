"""Autoscaling policies on a daily load: replica-hours against time to first token, for several node start times.

    python -m benchmarks.bench_autoscaling TRACE [--half second] [--starts 60 300 600] [--bounds 4 32] [--days 0 0.2]

Half of a trace becomes one "day" of an hour (cluster.simulate.daily_load) on replicas whose steps take ten times as
long as the example's, so that about 4 to 32 are needed; then every policy runs on it, within the same bounds and with
one router. Further days are the same half begun elsewhere (`--days`: after these shares of it), so that other requests
meet the ramp: one day says little, because a replica more or less at its beginning changes all that follows. Parameters
of kvray's policy and `--tuned`, the target of Serve's policy, were chosen on the first half; the second is reported.

Owns: the grid, the comparison, the tables.
Does not: simulate (cluster.simulate).
Invariants: every policy gets the same requests; replica-hours are paid from when a replica is asked for until it is
gone; nothing is left out of a percentile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paired_changes import told
from cluster.config import AutoscalingConfig
from cluster.core.hashing import ChunkHash
from cluster.simulate.daily_load import daily_load
from cluster.simulate.elastic_fleet import ElasticFleet, ElasticResult, Scaler
from cluster.simulate.fleet_report import make_fleet_report
from cluster.simulate.fleet_simulation import FleetSettings, trace_hashes
from cluster.simulate.mooncake_trace import TraceRequest, read_trace
from cluster.simulate.policy_lineup import OURS, chosen_policies
from cluster.simulate.scaled_replica import ReplicaSettings
from cluster.simulate.scalers import FixedReplicas, KvrayScaler, ServeDefault, ServeSettings
from cluster.simulate.step_times import EXAMPLE

SLOWER = 10.0
KV_TOKENS = 600_000
COPIES, DAY_S, SWING = 1, 3600.0, 8.0
FIRST = 28  # what the beginning, the busiest time, needs
TTFT_TARGET_S = 20.0
THEIRS = "Serve, default"


def rolled(requests: Sequence[TraceRequest], share: float) -> list[TraceRequest]:
    """The same requests at the same distances, begun after this share of them."""
    place = int(len(requests) * share)
    length_s = requests[-1].arrival_s + 0.5 - requests[0].arrival_s
    return [
        *requests[place:],
        *(one._replace(arrival_s=one.arrival_s + length_s) for one in requests[:place]),
    ]


def print_comparison(rows: Sequence[dict[str, Any]], theirs: str) -> None:
    """Ours over Serve's, less one, day by day."""
    print(f"\n| start | days | replica-hours against {theirs} | p90 against it | changes of direction, ours, theirs |")
    print("|---|---|---|---|---|")
    for start_s in dict.fromkeys(row["start_s"] for row in rows):
        days = {
            name: [row for row in rows if row["start_s"] == start_s and row["policy"] == name]
            for name in ("kvray", theirs)
        }
        pairs = list(zip(days["kvray"], days[theirs], strict=True))
        hours, p90 = (
            told_with_range([ours[what] / other[what] - 1 for ours, other in pairs]) for what in ("hours", "p90")
        )
        turns = [statistics.fmean(row["turns"] for row in found) for found in days.values()]
        print(f"| {start_s:.0f} s | {len(pairs)} | {hours} | {p90} | {turns[0]:.1f}, {turns[1]:.1f} |")


def told_with_range(changes: Sequence[float]) -> str:
    return f"{told(changes)} ({min(changes):+.1%} to {max(changes):+.1%})"


def scalers(
    start_s: float, tuned: float, bounds: tuple[int, int], more: dict[str, float]
) -> dict[str, Callable[[], Scaler]]:
    least, most = bounds
    ours = AutoscalingConfig(
        **{"min_replicas": least, "max_replicas": most, "ttft_target_s": TTFT_TARGET_S, "start_s": start_s, **more}
    )
    tuned_settings = ServeSettings(min_replicas=least, max_replicas=most, target_ongoing_requests=tuned)
    return {
        "kvray": lambda: KvrayScaler(ours.parameters()),
        THEIRS: lambda: ServeDefault(ServeSettings(min_replicas=least, max_replicas=most)),
        f"Serve, target {tuned:g}": lambda: ServeDefault(tuned_settings),
    }


def run_one(
    requests: Sequence[TraceRequest],
    hashes: dict[str, tuple[ChunkHash, ...]],
    scaler: Scaler,
    start_s: float,
    first: int,
) -> ElasticResult:
    replica = ReplicaSettings(kv_tokens=KV_TOKENS, step_time=EXAMPLE).slowed(SLOWER)
    settings = FleetSettings(replicas=first, replica=replica)
    (entry,) = chosen_policies(OURS)
    return ElasticFleet(
        requests, settings, entry, scaler, start_s=start_s, ttft_target_s=TTFT_TARGET_S, hashes=hashes
    ).run_elastic()


def row(name: str, start_s: float, day: float, result: ElasticResult, wall_s: float) -> dict[str, Any]:
    report = make_fleet_report(name, result.fleet, wall_s=wall_s)
    assert report.ttft is not None
    return {
        "policy": name,
        "start_s": start_s,
        "day": day,
        "hours": result.paid_s / 3600,
        "most": max(one.serving for one in result.census),
        "turns": result.turns,
        "mean": report.ttft.mean,
        "p50": report.ttft.p50,
        "p90": report.ttft.p90,
        "p99": report.ttft.p99,
        "hit": report.hit_rate,
        "requests": report.requests,
        "unfinished": report.requests - report.finished,
        "loaded": sum(result.fleet.loaded_s) / result.paid_s,
        "wall_s": wall_s,
    }


def print_row(one: dict[str, Any]) -> None:
    print(
        f"| {one['start_s']:.0f} s | {one['day']:g} | {one['policy']} | {one['hours']:.2f} | {one['most']} "
        f"| {one['turns']} | {one['mean']:.2f} | {one['p50']:.2f} | {one['p90']:.2f} | {one['p99']:.1f} "
        f"| {one['hit']:.1%} | {one['loaded']:.0%} | {one['wall_s']:.0f} |",
        flush=True,
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--half", choices=["first", "second"], default="second")
    parser.add_argument("--starts", type=float, nargs="+", default=[60.0, 300.0, 600.0])
    parser.add_argument("--bounds", type=int, nargs=2, default=[4, 32], metavar=("LEAST", "MOST"))
    parser.add_argument("--days", type=float, nargs="+", default=[0.0], metavar="SHARE")
    parser.add_argument("--tuned", type=float, nargs="+", default=[6.0])
    parser.add_argument("--only", nargs="+", help="policies by the beginning of their names")
    parser.add_argument("--fixed", type=int, nargs="*", default=[], help="such fleets, too")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of kvray's policy")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    requests = read_trace(options.trace)
    middle = len(requests) // 2
    half = requests[:middle] if options.half == "first" else requests[middle:]
    more = {name: float(value) for name, value in (one.split("=") for one in options.set)}
    print("| start | day | policy | replica-hours | most | turns | mean | p50 | p90 | p99 | hit | loaded | wall s |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    bounds = (options.bounds[0], options.bounds[1])
    rows: list[dict[str, Any]] = []
    for day in options.days:
        load = daily_load(rolled(half, day), copies=COPIES, duration_s=DAY_S, swing=SWING)
        hashes = trace_hashes(load)
        for start_s in options.starts:
            chosen: dict[str, tuple[Callable[[], Scaler], int]] = {}
            for tuned in options.tuned:
                chosen |= {name: (make, FIRST) for name, make in scalers(start_s, tuned, bounds, more).items()}
            for count in options.fixed:
                chosen[f"fixed {count}"] = (lambda count=count: FixedReplicas(count), count)  # type: ignore[misc]
            for name, (make, first) in chosen.items():
                if options.only and not name.startswith(tuple(options.only)):
                    continue
                began = time.perf_counter()
                result = run_one(load, hashes, make(), start_s, first)
                rows.append(row(name, start_s, day, result, time.perf_counter() - began))
                print_row(rows[-1])
                if options.json is not None:
                    options.json.write_text(json.dumps(rows, indent=1))
    if {"kvray", THEIRS} <= {one["policy"] for one in rows}:
        print_comparison(rows, THEIRS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
