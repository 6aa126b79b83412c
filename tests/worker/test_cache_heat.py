"""CacheHeat: new hits count, old ones fade, and small changes change nothing."""

from __future__ import annotations

from worker.cache_heat import CacheHeat


def test_hits_warm_and_time_cools() -> None:
    heat = CacheHeat()
    assert heat.level(0.0, 0) == 0.0
    assert heat.level(10.0, 1023) == 10.0
    assert heat.level(310.0, 1023) == 9.0
    assert heat.level(310.0, 1023 + 512) == 10.0
    assert heat.level(100_000.0, 1535) == 0.0


def test_small_changes_are_no_news() -> None:
    heat = CacheHeat()
    levels = {heat.level(float(second), 4096) for second in range(60)}
    assert len(levels) == 1


def test_a_counter_that_begins_anew_is_no_hit() -> None:
    heat = CacheHeat()
    heat.level(0.0, 5000)
    assert heat.level(3000.0, 10) < 3.0
