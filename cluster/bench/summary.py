"""Summary: all runs of one workload against one peer, as medians and ranges.

Owns: grouping records and the statistics of each figure.
Does not: choose or format figures (report).
Invariants: pure; only kept runs count; a figure that no kept run has is absent, and one that any kept run does not
report is None.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.bench.measures import Figure
from cluster.bench.run_record import RunRecord, Verdict


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """runs: all that began.  figures: a Spread, a tuple of medians (per turn), or None (not reported)."""

    peer: str
    workload: str
    runs: int
    kept: int
    failed: int
    figures: dict[str, Spread | tuple[float, ...] | None]

    def median(self, figure: str) -> float | None:
        value = self.figures.get(figure)
        return value.median if isinstance(value, Spread) else None

    def to_wire(self) -> dict[str, Any]:
        return {
            "peer": self.peer,
            "workload": self.workload,
            "runs": self.runs,
            "kept": self.kept,
            "failed": self.failed,
            "figures": {name: _plain(value) for name, value in self.figures.items()},
        }


def summarise(records: Iterable[RunRecord]) -> list[Summary]:
    """In the order in which pairs of workload and peer were first seen."""
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        groups.setdefault((record.workload, record.peer), []).append(record)
    return [_summary(workload, peer, group) for (workload, peer), group in groups.items()]


def _summary(workload: str, peer: str, records: list[RunRecord]) -> Summary:
    kept = [record for record in records if record.verdict is Verdict.KEPT]
    rows = [_all_figures(record) for record in kept]
    names = {name: None for row in rows for name in row}
    return Summary(
        peer=peer,
        workload=workload,
        runs=len(records),
        kept=len(kept),
        failed=sum(record.verdict is Verdict.FAILED for record in records),
        figures={name: _combine([row.get(name) for row in rows]) for name in names},
    )


def _all_figures(record: RunRecord) -> dict[str, Figure]:
    machine: dict[str, Figure] = {
        "noise": record.usage.noise,
        "peak_rss": record.usage.peak_rss,
        "server_cpu_s": record.usage.server_cpu_s,
        "client_cpu_s": record.usage.client_cpu_s,
    }
    if record.load_taken is not None:
        machine["load_taken"] = record.load_taken
    return record.figures | machine


def _combine(values: list[Figure]) -> Spread | tuple[float, ...] | None:
    rows = [value for value in values if isinstance(value, tuple)]
    numbers = [value for value in values if isinstance(value, int | float)]
    if rows and len(rows) == len(values):
        return tuple(statistics.median(column) for column in zip(*rows, strict=True))
    if numbers and len(numbers) == len(values):
        return Spread.of(numbers)
    return None


def _plain(value: Spread | tuple[float, ...] | None) -> Any:
    if isinstance(value, Spread):
        return {"median": value.median, "min": value.low, "max": value.high}
    return value
