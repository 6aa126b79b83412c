"""SimReport: the figures of one simulation, for people and for machines.

Owns: percentiles (nearest rank, so that a figure is always one that occurred), classes of requests, the table.
Does not: run anything.
Invariants: a figure that nothing contributed to is None, never 0 or NaN; only `wall_s` differs between equal runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from cluster.simulate.engine_simulation import SimResult
from cluster.simulate.ideal_hits import ideal_hits, is_cold
from cluster.simulate.mooncake_trace import TraceRequest
from cluster.simulate.request_log import RequestRecord


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimReport:
    """cold: at most 512 prompt tokens came from the cache; warm: more.  new: no more could have come from any
    cache; seen: all others.

    hit_rate: share of the prompt tokens of all requests that got a token which came from the cache.
    ideal_hit_rate: with one infinite cache.
    duplicated_prefill_tokens: computed although another request was computing the same ones at that moment.
    busy_share: time in steps, of the time until the last arrival or, when later, the last token.
    """

    speed: float
    finished: int
    refused: int
    expired: int
    ttft: Spread | None
    ttft_cold: Spread | None
    ttft_warm: Spread | None
    ttft_new: Spread | None
    ttft_seen: Spread | None
    inter_token: Spread | None
    queue: Spread | None
    preemptions: int
    hit_rate: float | None
    ideal_hit_rate: float
    prefill_tokens: int
    duplicated_prefill_tokens: int
    busy_share: float | None
    virtual_s: float
    wall_s: float
    steps: int
    fast_steps: int

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def make_report(requests: Sequence[TraceRequest], result: SimResult, *, speed: float, wall_s: float) -> SimReport:
    records = list(result.log.records.values())
    ideal = ideal_hits(requests)
    new = {request.request_id for request, hit in zip(requests, ideal, strict=True) if is_cold(hit)}
    started = [record for record in records if record.first_token_s is not None]
    asked = sum(record.request.prompt_tokens for record in started)

    def ttft(belongs: Callable[[RequestRecord], bool]) -> Spread | None:
        return spread([record.ttft_s for record in started if belongs(record) and record.ttft_s is not None])

    return SimReport(
        speed=speed,
        finished=sum(record.finished_s is not None for record in records),
        refused=sum(record.refused and not record.expired for record in records),
        expired=sum(record.expired for record in records),
        ttft=ttft(lambda _: True),
        ttft_cold=ttft(lambda record: is_cold(record.cached_tokens)),
        ttft_warm=ttft(lambda record: not is_cold(record.cached_tokens)),
        ttft_new=ttft(lambda record: record.request.request_id in new),
        ttft_seen=ttft(lambda record: record.request.request_id not in new),
        inter_token=spread(result.log.gaps, result.log.gap_counts),
        queue=spread([r.admitted_s - r.request.arrival_s for r in records if r.admitted_s is not None]),
        preemptions=result.preemptions,
        hit_rate=sum(record.cached_tokens for record in started) / asked if asked else None,
        ideal_hit_rate=sum(ideal) / sum(request.prompt_tokens for request in requests),
        prefill_tokens=result.prefill_tokens,
        duplicated_prefill_tokens=result.log.duplicated_tokens,
        busy_share=result.busy_s / result.virtual_s if result.virtual_s else None,
        virtual_s=result.virtual_s,
        wall_s=wall_s,
        steps=result.steps,
        fast_steps=result.fast_steps,
    )


def spread(values: Sequence[float], counts: Sequence[int] | None = None) -> Spread | None:
    """`counts`: how often each value occurred (default: once)."""
    pairs = sorted(zip(values, counts or [1] * len(values), strict=True))
    total = sum(count for _, count in pairs)
    if not total:
        return None
    mean = math.fsum(value * count for value, count in pairs) / total
    ranks = [max(math.ceil(share * total), 1) for share in (0.5, 0.9, 0.99)]
    found: list[float] = []
    reached = 0
    for value, count in pairs:
        reached += count
        while len(found) < len(ranks) and ranks[len(found)] <= reached:
            found.append(value)
    p50, p90, p99 = found
    return Spread(total, mean, p50, p90, p99, pairs[-1][0])


def to_table(report: SimReport) -> Table:
    """Seconds, if nothing else is said."""
    table = Table("seconds", "requests", "mean", "p50", "p90", "p99", "max")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {
        "TTFT": report.ttft,
        "TTFT cold (hit ≤ 512)": report.ttft_cold,
        "TTFT warm": report.ttft_warm,
        "TTFT new (no cache could help)": report.ttft_new,
        "TTFT seen": report.ttft_seen,
        "queue": report.queue,
        "between tokens": report.inter_token,
    }
    for name, one in rows.items():
        figures = (
            ["0"] if one is None else [f"{one.count:,}", *map(_seconds, (one.mean, one.p50, one.p90, one.p99, one.max))]
        )
        table.add_row(name, *figures)
    return table


def to_lines(report: SimReport) -> list[str]:
    share = _share(report.hit_rate)
    return [
        f"finished {report.finished:,}, refused {report.refused:,}, expired {report.expired:,}, "
        f"preemptions {report.preemptions:,}",
        f"hit rate {share} of prompt tokens (infinite cache {_share(report.ideal_hit_rate)}), prefilled "
        f"{report.prefill_tokens:,} tokens, {report.duplicated_prefill_tokens:,} of them duplicated",
        f"speed {report.speed:.4g}, busy {_share(report.busy_share)} of {report.virtual_s:,.1f} s, "
        f"{report.steps:,} steps ({report.fast_steps:,} fast-forwarded) in {report.wall_s:.1f} s",
    ]


def _seconds(value: float) -> str:
    return f"{value:,.4f}" if value < 1 else f"{value:,.2f}"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"
