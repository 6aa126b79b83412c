"""The order of the queue under pressure: TTFT, hit rate and preemptions, on a trace in virtual time.

    python benchmarks/bench_scheduler.py TRACE [--load 0.85] [--limit N] [--markdown FILE]

TRACE: a file in the Mooncake format. One simulated replica (the real scheduler and KV bookkeeping; step times of
cluster.simulate.step_times) takes the trace at the given share of what it can do, which is measured once per trace, so
that all rows of a table see the same arrivals. Cold: no more than 512 prompt tokens could come from any cache; that is
the same set of requests in every row. Then the hold-back scenario: 32 requests at once behind one new prefix.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.simulate.engine_simulation import EngineSimulation
from cluster.simulate.load_search import speed_for
from cluster.simulate.mooncake_trace import TraceRequest, read_trace
from cluster.simulate.sim_report import SimReport, Spread, make_report
from cluster.simulate.sim_settings import SimSettings
from cluster.simulate.step_times import EXAMPLE_KV_TOKENS
from cluster.simulate.trace_variants import at_speed, shared_burst, with_cold_share

COLUMNS = ("order", "TTFT p50", "p99", "cold p99", "warm p99", "longest queue", "hit rate", "preemptions")
BURST, PREFIX = 32, 4000


def orders(bounds: Sequence[float]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "longest prefix first", {"ageing_s": math.inf}
    yield "first come, first served", {"scheduling": "fcfs"}
    for bound in bounds:
        yield f"longest prefix first, ageing {bound:g} s", {"ageing_s": bound}


def settings_of(args: argparse.Namespace, **engine: Any) -> SimSettings:
    limits = {"token_budget": args.token_budget, "max_num_seqs": args.max_num_seqs, **engine}
    return SimSettings(block_size=args.block_size, num_blocks=args.kv_tokens // args.block_size, engine=limits)


def run(requests: Sequence[TraceRequest], settings: SimSettings, speed: float = 1.0) -> SimReport:
    started = time.perf_counter()
    result = EngineSimulation(requests, settings).run()
    return make_report(requests, result, speed=speed, wall_s=time.perf_counter() - started)


def trace_table(title: str, requests: Sequence[TraceRequest], args: argparse.Namespace) -> list[str]:
    speed = args.speed or speed_for(args.load, requests, settings_of(args, ageing_s=math.inf))
    arriving = at_speed(requests, speed)
    rows = []
    for name, engine in orders(args.ageing):
        report = run(arriving, settings_of(args, **engine), speed)
        print(
            f"# {title}: {name}: {report.steps:,} steps, busy {report.busy_share:.1%}, {report.wall_s:.0f} s",
            flush=True,
        )
        figures = [*_ttft(report), _seconds(report.queue.max if report.queue else None)]
        rows.append([name, *figures, f"{report.hit_rate or 0:.2%}", f"{report.preemptions:,}"])
    return [f"{title}, {len(requests):,} requests at speed {speed:.4g}; seconds", "", *_markdown(COLUMNS, rows), ""]


def hold_back_table(args: argparse.Namespace) -> list[str]:
    rows = []
    requests = shared_burst(BURST, prefix_tokens=PREFIX)
    for budget in (8192, BURST * PREFIX * 2):
        reports = [run(requests, settings_of(args, token_budget=budget, hold_back=held)) for held in (False, True)]
        for name, report in zip(("off", "on"), reports, strict=True):
            ttft = report.ttft.max if report.ttft else None
            rows.append(
                [
                    f"{budget:,}",
                    name,
                    f"{report.duplicated_prefill_tokens:,}",
                    f"{report.prefill_tokens:,}",
                    _seconds(ttft),
                ]
            )
    columns = ("token budget", "holding back", "duplicated prefill tokens", "prefill tokens", "last first token")
    return [f"{BURST} requests at once, one new prefix of {PREFIX:,} tokens", "", *_markdown(columns, rows), ""]


def _ttft(report: SimReport) -> list[str]:
    everybody, cold = report.ttft, report.ttft_new
    return [
        _seconds(everybody.p50 if everybody else None),
        _seconds(everybody.p99 if everybody else None),
        _p99(cold),
        _p99(report.ttft_seen),
    ]


def _p99(spread: Spread | None) -> str:
    return _seconds(spread.p99 if spread else None)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---" if n == 0 else "---:" for n in range(len(columns))]
    return [f"| {' | '.join(row)} |" for row in (columns, rule, *rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--load", type=float, default=0.85)
    parser.add_argument("--speed", type=float, help="instead of --load: arrivals so many times as fast")
    parser.add_argument("--limit", type=int, help="only the first requests")
    parser.add_argument("--cold-share", type=float, default=0.05)
    parser.add_argument("--only", choices=["trace", "variant", "burst"], help="one of the three tables")
    parser.add_argument("--ageing", type=float, nargs="*", default=[2.0, 10.0, 30.0], help="bounds in seconds")
    parser.add_argument("--kv-tokens", type=int, default=EXAMPLE_KV_TOKENS)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--markdown", type=Path, help="file for the tables")
    args = parser.parse_args()

    requests = read_trace(args.trace, limit=args.limit)
    lines: list[str] = []
    if args.only in (None, "burst"):
        lines += hold_back_table(args)
    if args.only in (None, "variant"):
        lines += trace_table(f"{args.cold_share:.0%} cold requests", with_cold_share(requests, args.cold_share), args)
    if args.only in (None, "trace"):
        lines += trace_table("the trace as it is", requests, args)
    text = "\n".join(lines)
    print(text)
    if args.markdown is not None:
        args.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
