"""MetricTools: what a metrics library offers us, as little as we need of it.

Owns: the protocols, and the tools that do nothing.
Does not: export (cluster.ray_metrics does it with Ray's).
Invariants: a metric is made once per process and name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Gauge(Protocol):
    def set(self, value: float) -> None: ...


class Counter(Protocol):
    def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
        """`value`: above 0."""


class Histogram(Protocol):
    def observe(self, value: float) -> None: ...


class MetricTools(Protocol):
    def gauge(self, name: str, help: str) -> Gauge: ...

    def counter(self, name: str, help: str, tag_keys: tuple[str, ...] = ()) -> Counter: ...

    def histogram(self, name: str, help: str, boundaries: Sequence[float]) -> Histogram:
        """`boundaries`: upper ends of the buckets, rising, above 0."""


class _Nothing:
    def set(self, value: float) -> None:
        pass

    def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
        pass

    def observe(self, value: float) -> None:
        pass


class NoMetrics:
    """For processes that export nothing."""

    def gauge(self, name: str, help: str) -> Gauge:
        return _Nothing()

    def counter(self, name: str, help: str, tag_keys: tuple[str, ...] = ()) -> Counter:
        return _Nothing()

    def histogram(self, name: str, help: str, boundaries: Sequence[float]) -> Histogram:
        return _Nothing()
