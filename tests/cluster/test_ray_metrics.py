"""RayMetrics: what Ray's metrics take, and refuse, is what our tools promise."""

from __future__ import annotations

import pytest
from ray.serve import metrics

from cluster.metric_tools import MetricTools
from cluster.ray_metrics import RayMetrics
from router.request_metrics import RequestMetrics


def test_each_tool_is_rays_and_takes_what_we_give_it() -> None:
    tools: MetricTools = RayMetrics()
    gauge, counter = tools.gauge("kvray_test_gauge", "help"), tools.counter("kvray_test_counter", "help", ("code",))
    histogram = tools.histogram("kvray_test_histogram", "help", (0.1, 1.0))
    assert isinstance(gauge, metrics.Gauge)
    assert isinstance(counter, metrics.Counter)
    assert isinstance(histogram, metrics.Histogram)
    gauge.set(0.0)
    counter.inc(2.5, {"code": "full"})
    histogram.observe(0.5)
    assert gauge.info["name"] == "kvray_test_gauge"
    assert counter.info["tag_keys"] == ("code",)
    with pytest.raises(ValueError):
        counter.inc(1, {"reason": "a label that was not declared"})


def test_a_front_doors_metrics_can_be_made_with_them() -> None:
    with RequestMetrics(RayMetrics()).watched() as times:
        times.finish_reason = "stop"
