"""IndexStatus: what one router knows of the shared index, for `kvray status`, metrics and logs.

Owns: the values, and the metric names of the follower's counters.
Does not: gather them (router.routing_state) or render them.
Invariants: values of one moment; metric names begin with `kvray_`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from cluster.core.metric_reading import MetricReading, readings_of
from cluster.core.replica import Epoch, WorkerId
from cluster.index.known import FollowerCounters, FollowerState

_GAUGES = frozenset(
    {
        "kvray_index_longest_lookup_seconds",
        "kvray_index_records",
        "kvray_index_speculative_entries",
        "kvray_index_speculative_chunks",
        "kvray_index_feed_lag_seconds",
        "kvray_index_load_only_workers",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIndexStatus:
    """chunks: that the index credits to the worker.  affinity: they count when a prompt is routed.

    same_scheme: the worker hashes prompts as this router does.  load_age_s: since its load was last read.
    """

    worker_id: WorkerId
    epoch: Epoch
    chunks: int
    affinity: bool
    same_scheme: bool
    load_age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStatus:
    """state: of the feed.  metrics: counters since the start and gauges of now, by metric name."""

    router_id: str
    state: FollowerState
    workers: tuple[WorkerIndexStatus, ...]
    metrics: dict[str, float]

    def readings(self) -> tuple[MetricReading, ...]:
        return readings_of(self.metrics, _GAUGES, "Of one front door; docs/operations.md says what it tells")


def follower_metrics(counters: FollowerCounters) -> dict[str, float]:
    """Its numbers by metric name; whatever else it holds (by worker, say) is left out."""
    numbers = {name: value for name, value in asdict(counters).items() if isinstance(value, int | float)}
    return {f"kvray_index_feed_{_in_words(name)}": value for name, value in numbers.items()}


def _in_words(name: str) -> str:
    return f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name
