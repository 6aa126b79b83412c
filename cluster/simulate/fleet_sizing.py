"""fleet_sizing: the fewest replicas with which a policy keeps its time to first token.

    replicas    4      8     16     12     10     11
    p90 TTFT    9.1    3.0    0.9    1.4    2.4    1.9      target 2.0 s: 11

Owns: that search, and what such a fleet costs.
Does not: simulate.
Invariants: every size is run once; the answer keeps the target, and one replica less does not, as far as that was run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from cluster.simulate.fleet_report import FleetReport

MOST_REPLICAS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSize:
    """replicas None: not even with `MOST_REPLICAS`; the other figures are then of the largest that was run."""

    policy: str
    replicas: int | None
    gpu_hours: float
    hit_rate: float | None
    ttft_mean_s: float | None
    ttft_p90_s: float | None

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def smallest_fleet(policy: str, target_s: float, run: Callable[[int], FleetReport], start: int = 1) -> FleetSize:
    """`run`: the report of so many replicas.  `start`: where to look first."""
    known: dict[int, FleetReport] = {}

    def keeps(replicas: int) -> bool:
        if replicas not in known:
            known[replicas] = run(replicas)
        ttft = known[replicas].ttft
        return ttft is not None and ttft.p90 <= target_s

    high = min(max(start, 1), MOST_REPLICAS)
    low = 0  # too few
    while not keeps(high):
        if high == MOST_REPLICAS:
            return _size(policy, None, known[high])
        low, high = high, min(2 * high, MOST_REPLICAS)
    while low == 0 and high > 1:
        half = high // 2
        if keeps(half):
            high = half
        else:
            low = half
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return _size(policy, high, known[high])


def sizes_table(sizes: Sequence[FleetSize], target_s: float) -> Table:
    table = Table("policy", "replicas", "GPU-hours", "hit", "mean TTFT", "p90 TTFT")
    table.caption = f"the fewest replicas with a p90 TTFT of at most {target_s:g} s, one GPU each"
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    for size in sizes:
        table.add_row(
            size.policy,
            f"over {MOST_REPLICAS}" if size.replicas is None else str(size.replicas),
            f"{size.gpu_hours:,.2f}",
            "-" if size.hit_rate is None else f"{size.hit_rate:.1%}",
            *("-" if value is None else f"{value:,.3f}" for value in (size.ttft_mean_s, size.ttft_p90_s)),
        )
    return table


def _size(policy: str, replicas: int | None, report: FleetReport) -> FleetSize:
    return FleetSize(
        policy=policy,
        replicas=replicas,
        gpu_hours=report.gpu_hours,
        hit_rate=report.hit_rate,
        ttft_mean_s=None if report.ttft is None else report.ttft.mean,
        ttft_p90_s=None if report.ttft is None else report.ttft.p90,
    )
