"""OwnWork: what is left ahead of a newcomer, by hand."""

from __future__ import annotations

from cluster.core.replica import WorkerId
from router.own_work import NO_WORK, OwnWork, Work

A, B = WorkerId("a"), WorkerId("b")


def test_what_is_computed_now_shrinks_and_the_rest_counts_in_full() -> None:
    work = OwnWork()
    work.book("r1", A, 2.0, 100, 0, now=10.0)
    work.book("r2", A, 0.5, 50, 0, now=10.1)
    assert work.look(A, 0, now=10.5) == Work(1.5 + 0.5, 0, 0, 0, 150)
    assert work.look(A, 0, now=13.0).ahead_s == 0.5  # late: it is about to be done
    work.answered("r1", now=13.0)
    assert work.look(A, 0, now=13.25) == Work(0.25, 0, 1, 100, 150)
    assert work.look(B, 0, now=13.1) == NO_WORK


def test_more_in_the_cache_overtakes_unless_the_other_waits_for_long() -> None:
    work = OwnWork(ageing_s=2.0)
    for name, seconds in (("first", 9.0), ("waits", 1.0)):
        work.book(name, A, seconds, 100, 10, now=0.0)
    assert work.look(A, 50, now=1.0)[:2] == (8.0, 1)
    assert work.look(A, 10, now=1.0)[:2] == (9.0, 0)
    assert work.look(A, 50, now=2.0)[:2] == (8.0, 0)


def test_everything_may_come_twice_and_nothing_is_left() -> None:
    work = OwnWork()
    work.book("r", A, 1.0, 10, 0, now=0.0)
    work.book("r", B, 1.0, 10, 0, now=0.0)
    assert work.look(A, 0, now=0.0) == NO_WORK
    for _ in range(2):
        work.answered("r", now=1.0)
        assert work.look(B, 0, now=1.0) == Work(0.0, 0, 1, 10, 10)
    for _ in range(2):
        work.release("r", now=1.0)
        work.answered("r", now=2.0)
        assert (len(work), work.look(B, 0, now=2.0)) == (0, NO_WORK)


def test_the_requests_of_a_dead_process_count_no_more() -> None:
    work = OwnWork()
    work.book("old", A, 5.0, 10, 0, now=0.0)
    work.book("other", B, 5.0, 10, 0, now=0.0)
    work.end_life(A)
    work.book("new", A, 1.0, 20, 0, now=1.0)
    work.release("old", now=1.0)
    assert (work.look(A, 0, now=1.0), len(work)) == (Work(1.0, 0, 0, 0, 20), 2)


def test_the_time_that_requests_decode_is_a_moving_mean() -> None:
    work = OwnWork()
    work.book("probe", A, 1.0, 10, 0, now=0.0)
    for number in range(200):
        work.book(str(number), B, 1.0, 10, 0, now=0.0)
        work.answered(str(number), now=1.0)
        work.release(str(number), now=5.0)
    assert abs(work.look(A, 0, now=0.0).decode_s - 4.0) < 0.01
