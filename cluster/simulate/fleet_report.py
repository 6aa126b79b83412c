"""FleetReport: the figures of one policy on one trace, and the table and bound to read them by.

**The clairvoyant bound** on the mean time to first token, which no policy can beat on these replicas: the larger of

    alone    every request has a replica to itself, idle, that holds all that any request before it had, at once
    pooled   one replica as fast as all together, which serves the request with the least work left first (that
             minimises the mean), decodes nothing, loads its weights for full steps only, and holds all that was before

Owns: statistics of a FleetResult, the bound, the table.
Does not: run anything.
Invariants: a figure that nothing contributed to is None; requests that were shed or failed are counted, never left out
in silence: their times are in no percentile.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from cluster.core.step_time import StepTimeModel
from cluster.simulate.fleet_simulation import FleetResult
from cluster.simulate.mooncake_trace import TraceRequest
from cluster.simulate.sim_report import Spread, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """hit_rate: of the prompt tokens of requests with a first token.  hotspot: replicas * the largest share.

    utilisation: share of time in which a replica prefills or somebody waits there, over all.
    gpu_hours: all replicas from the first to the last second, one GPU each.  decisions_per_s: of real time.
    """

    policy: str
    requests: int
    finished: int
    shed: int
    failed: int
    hit_rate: float | None
    ttft: Spread | None
    inter_token: Spread | None
    hotspot: float
    utilisation: float
    preemptions: int
    prefill_tokens: int
    decisions_per_s: float
    virtual_s: float
    gpu_hours: float
    wall_s: float

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def make_fleet_report(
    policy: str, result: FleetResult, *, wall_s: float, skip: frozenset[str] = frozenset()
) -> FleetReport:
    """`skip`: request ids that only warmed the fleet up."""
    records = [record for name, record in result.records.items() if name not in skip]
    started = [record for record in records if record.first_token_s is not None]
    asked = sum(record.request.prompt_tokens for record in started)
    shares = [0] * len(result.busy_s)
    for record in records:
        shares[record.replica] += 1
    return FleetReport(
        policy=policy,
        requests=len(records),
        finished=sum(record.finished_s is not None for record in records),
        shed=sum(record.shed for record in records),
        failed=sum(record.failed for record in records),
        hit_rate=sum(record.cached_tokens for record in started) / asked if asked else None,
        ttft=spread([record.ttft_s for record in started if record.ttft_s is not None]),
        inter_token=spread(result.gaps, result.gap_counts),
        hotspot=len(shares) * max(shares) / max(len(records), 1),
        utilisation=sum(result.loaded_s) / (len(shares) * result.virtual_s) if result.virtual_s else 0.0,
        preemptions=result.preemptions,
        prefill_tokens=result.prefill_tokens,
        decisions_per_s=result.decisions / result.choosing_s if result.choosing_s else math.inf,
        virtual_s=result.virtual_s,
        gpu_hours=len(shares) * result.virtual_s / 3600,
        wall_s=wall_s,
    )


def clairvoyant_bound(
    requests: Sequence[TraceRequest], hits: Sequence[int], replicas: int, times: StepTimeModel, token_budget: int
) -> float:
    """Seconds: a lower bound on the mean time to first token of any policy. `hits`: of `ideal_hits`."""
    work = [
        (_least_s(request, hit, times) + times.base * (request.prompt_tokens - hit) / token_budget) / replicas
        for request, hit in zip(requests, hits, strict=True)
    ]
    pooled = _shortest_remaining_first([request.arrival_s for request in requests], work)
    return max(mean_alone(requests, hits, times, token_budget), math.fsum(pooled) / len(pooled))


def mean_alone(requests: Sequence[TraceRequest], hits: Sequence[int], times: StepTimeModel, token_budget: int) -> float:
    """Seconds: the mean time to first token if nobody ever waited and each request found so many tokens."""
    alone = (
        _least_s(request, hit, times) + times.base * -(-(request.prompt_tokens - hit) // token_budget)
        for request, hit in zip(requests, hits, strict=True)
    )
    return math.fsum(alone) / len(requests)


def _least_s(request: TraceRequest, hit: int, times: StepTimeModel) -> float:
    """What its own tokens take, without the weights that each step reads."""
    tokens = request.prompt_tokens - hit
    attended = tokens * (hit + (tokens + 1) / 2)
    return times.per_prefill_token * tokens + times.per_prefill_context * attended


def _shortest_remaining_first(arrivals: Sequence[float], work: Sequence[float]) -> list[float]:
    """The time each job spends, on one machine."""
    spent: list[float] = []
    left: list[tuple[float, float]] = []  # work left, arrival
    now = 0.0
    for arrival, seconds in zip(arrivals, work, strict=True):
        while left and now + left[0][0] <= arrival:
            remaining, came = heapq.heappop(left)
            now += remaining
            spent.append(now - came)
        if left:
            remaining, came = left[0]
            heapq.heapreplace(left, (remaining - (arrival - now), came))
        now = arrival
        heapq.heappush(left, (seconds, arrival))
    while left:
        remaining, came = heapq.heappop(left)
        now += remaining
        spent.append(now - came)
    return spent


def fleet_table(reports: Sequence[FleetReport], bound_s: float) -> Table:
    times = ("mean", "p50", "p90", "p99", "per token")
    heads = ("policy", "hit", *times, "shed+failed", "hotspot", "util", "GPU-h", "decisions/s")
    table = Table(*heads, caption=f"TTFT in seconds; no policy can have a mean below {bound_s:.3f} (clairvoyant bound)")
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    for report in reports:
        ttft, gap = report.ttft, report.inter_token
        spread_s = ["-"] * 4 if ttft is None else [f"{s:,.3f}" for s in (ttft.mean, ttft.p50, ttft.p90, ttft.p99)]
        table.add_row(
            report.policy,
            "-" if report.hit_rate is None else f"{report.hit_rate:.1%}",
            *spread_s,
            "-" if gap is None else f"{gap.mean:.4f}",
            f"{report.shed + report.failed:,}",
            f"{report.hotspot:.2f}",
            f"{report.utilisation:.0%}",
            f"{report.gpu_hours:,.1f}",
            f"{report.decisions_per_s:,.0f}",
        )
    return table
