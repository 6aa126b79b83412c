"""RayMetrics: MetricTools in Ray Serve's form. Prometheus finds them as `ray_kvray_...` at every node's metrics port.

Owns: this translation.
Does not: decide what is exported.
Invariants: inside a replica, Serve adds the labels deployment, replica and application by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ray.serve import metrics

from cluster.metric_tools import Counter, Gauge, Histogram


class RayMetrics:
    """MetricTools."""

    def gauge(self, name: str, help: str) -> Gauge:
        return cast("Gauge", metrics.Gauge(name, description=help))

    def counter(self, name: str, help: str, tag_keys: tuple[str, ...] = ()) -> Counter:
        return cast("Counter", metrics.Counter(name, description=help, tag_keys=tag_keys))

    def histogram(self, name: str, help: str, boundaries: Sequence[float]) -> Histogram:
        return cast("Histogram", metrics.Histogram(name, description=help, boundaries=list(boundaries)))
