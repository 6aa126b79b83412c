"""MetricTools that remember: every value that reached a metric, by name and label."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.metric_tools import Counter, Gauge, Histogram

Labels = tuple[tuple[str, str], ...]


@dataclass
class FakeMetrics:
    """gauges: the last value.  counters: by name, then by labels.  observed: by histogram."""

    gauges: dict[str, float] = field(default_factory=dict)
    counters: dict[str, dict[Labels, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    observed: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    made: list[str] = field(default_factory=list)

    def gauge(self, name: str, help: str) -> Gauge:
        return self._made(name)

    def counter(self, name: str, help: str, tag_keys: tuple[str, ...] = ()) -> Counter:
        return self._made(name, tag_keys)

    def histogram(self, name: str, help: str, boundaries: Sequence[float]) -> Histogram:
        assert list(boundaries) == sorted(set(boundaries)) and boundaries[0] > 0
        return self._made(name)

    def _made(self, name: str, tag_keys: tuple[str, ...] = ()) -> _Metric:
        assert name not in self.made, f"{name} is made twice"
        self.made.append(name)
        return _Metric(self, name, tag_keys)


@dataclass
class _Metric:
    tools: FakeMetrics
    name: str
    tag_keys: tuple[str, ...]

    def set(self, value: float) -> None:
        self.tools.gauges[self.name] = value

    def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
        assert value > 0, "Ray refuses it"
        labels = {} if tags is None else tags
        assert tuple(labels) == self.tag_keys
        self.tools.counters[self.name][tuple(labels.items())] += value

    def observe(self, value: float) -> None:
        self.tools.observed[self.name].append(value)
