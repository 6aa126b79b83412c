"""FirstTokenTimes: the p90 of what is recent, and nothing of what is not."""

from __future__ import annotations

from worker.first_token_times import FirstTokenTimes


def test_p90_of_the_last_minute() -> None:
    times = FirstTokenTimes()
    assert times.p90(0.0) == 0.0
    for n in range(10):
        times.note(float(n), 1.0 + n)
    assert times.p90(10.0) == 9.0
    assert times.p90(64.0) == 10.0, "only those that came at 4 or later"
    assert times.p90(200.0) == 0.0


def test_memory_is_bounded_and_the_newest_count() -> None:
    times = FirstTokenTimes()
    for n in range(5000):
        times.note(0.0, 1.0 if n < 4000 else 2.0)
    assert len(times._times) == 512
    assert times.p90(1.0) == 2.0
