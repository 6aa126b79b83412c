"""MetricReading: one number of one moment, with all that a metrics system needs to know of it.

Owns: the value, and reading a dict of counters and gauges by name.
Does not: count, or export (cluster.metric_export, router.metrics_page).
Invariants: names begin with `kvray_`; a counter never falls while its process lives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import NamedTuple


class MetricKind(Enum):
    COUNTER = auto()
    GAUGE = auto()


class MetricReading(NamedTuple):
    """help: one line."""

    name: str
    value: float
    kind: MetricKind
    help: str


def readings_of(numbers: Mapping[str, float], gauges: Collection[str], help: str) -> tuple[MetricReading, ...]:
    """`numbers` by metric name: counters, but for those in `gauges`."""
    return tuple(
        MetricReading(name, value, MetricKind.GAUGE if name in gauges else MetricKind.COUNTER, help)
        for name, value in numbers.items()
    )
