"""MetricExport: totals become growth, gauges are set, and a failure stops nothing."""

from __future__ import annotations

import asyncio
import logging

import pytest
from fake_metrics import FakeMetrics

from cluster import metric_export
from cluster.core.metric_reading import MetricKind, MetricReading, readings_of
from cluster.core.replica import ReplicaLoad
from cluster.core.replica_metrics import replica_readings
from cluster.metric_export import MetricExport


def test_a_replicas_load_under_the_fields_names() -> None:
    load = ReplicaLoad(
        waiting=3,
        held=1,
        running=2,
        uncached_tokens={"a": 100, "b": 20},
        free_blocks=50,
        cached_blocks=30,
        in_use_blocks=20,
        total_blocks=100,
        query_tokens=1000,
        hit_tokens=400,
        generated_tokens=77,
        preemptions=5,
    )
    tools = FakeMetrics()
    MetricExport(tools, lambda: replica_readings(load)).export()
    assert tools.gauges["kvray_num_requests_running"] == 2
    assert tools.gauges["kvray_num_requests_waiting"] == 3
    assert tools.gauges["kvray_kv_cache_usage_perc"] == 0.2
    assert tools.gauges["kvray_kv_cache_cached_perc"] == 0.3
    assert tools.gauges["kvray_uncached_tokens"] == 120
    assert tools.counters["kvray_prefix_cache_queries"] == {(): 1000}
    assert tools.counters["kvray_prefix_cache_hits"] == {(): 400}
    assert tools.counters["kvray_generation_tokens"] == {(): 77}
    assert tools.counters["kvray_num_preemptions"] == {(): 5}
    assert all(name.startswith("kvray_") for name in tools.made)


def test_an_engine_that_has_no_blocks_yet_is_not_divided_by() -> None:
    readings = {reading.name: reading.value for reading in replica_readings(ReplicaLoad())}
    assert readings["kvray_kv_cache_usage_perc"] == 0.0


def test_a_counter_grows_by_what_is_new_and_survives_a_fresh_start() -> None:
    totals = iter([5.0, 5.0, 9.0, 2.0])
    tools = FakeMetrics()
    export = MetricExport(tools, lambda: [MetricReading("kvray_n", next(totals), MetricKind.COUNTER, "")])
    seen = []
    for _ in range(4):
        export.export()
        seen.append(tools.counters["kvray_n"][()])
    assert seen == [5, 5, 9, 11]
    assert tools.made == ["kvray_n"]


def test_numbers_by_name_are_counters_but_for_the_gauges() -> None:
    kinds = {r.name: r.kind for r in readings_of({"kvray_a": 1, "kvray_b": 2}, {"kvray_b"}, "help")}
    assert kinds == {"kvray_a": MetricKind.COUNTER, "kvray_b": MetricKind.GAUGE}


async def test_a_reading_that_fails_is_told_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metric_export, "INTERVAL_S", 0.0)
    tools, tries = FakeMetrics(), 0
    done = asyncio.Event()

    def read() -> list[MetricReading]:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise RuntimeError("not now")
        done.set()
        return [MetricReading("kvray_g", 7, MetricKind.GAUGE, "")]

    with caplog.at_level(logging.ERROR):
        task = asyncio.create_task(MetricExport(tools, read).run())
        await asyncio.wait_for(done.wait(), 10)
        task.cancel()
    assert tools.gauges == {"kvray_g": 7}
    assert len(caplog.records) == 1
