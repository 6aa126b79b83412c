"""OwnWork: what is left ahead of a newcomer, by hand."""

from __future__ import annotations

import pytest

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
    assert work.look(A, 0, now=13.25) == Work(0.25, 0, 1, 100, 150, 0.25)
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


def test_the_first_answers_already_say_how_long_requests_decode() -> None:
    work = OwnWork()
    for number, seconds in enumerate((6.0, 8.0, 10.0)):
        work.book(str(number), A, 1.0, 10, 0, now=0.0)
        work.answered(str(number), now=1.0)
        work.release(str(number), now=1.0 + seconds)
    work.book("probe", B, 1.0, 10, 0, now=20.0)
    assert work.look(B, 0, now=20.0).decode_s == pytest.approx(8.0)


def test_what_decodes_for_longer_than_others_did_is_believed() -> None:
    work = OwnWork()
    work.book("short", A, 1.0, 10, 0, now=0.0)
    work.answered("short", now=1.0)
    work.release("short", now=2.0)
    for name, at in (("a", 10.0), ("b", 14.0)):
        work.book(name, A, 1.0, 10, 0, now=at)
        work.answered(name, now=at)
    assert work.look(A, 0, now=12.5).decode_s == 1.0, "0.5 s on average, and the first ones took 1 s"
    assert work.look(A, 0, now=20.0).decode_s == 8.0
    work.release("a", now=20.0)  # after 10 s: the mean of 1 and 10
    assert work.look(A, 0, now=20.0).decode_s == 6.0, "b for 6 s so far"
    work.release("b", now=20.0)
    assert work.look(A, 0, now=20.0) == NO_WORK


def test_a_wait_for_a_seat_does_not_make_a_replica_slow() -> None:
    work = OwnWork(seats=1)
    for number, at in ((0, 0.0), (1, 0.1)):
        work.book(f"r{number}", A, 0.1, 1000, 0, at)
    work.answered("r0", 0.1, 0)
    assert work.pace(A, 50.0) == 1.0, "r1 waits for the seat of r0, however long"
    assert work.look(A, 0, 50.0).ahead_s == 0.1
    work.release("r0", 60.0)
    assert work.look(A, 0, 60.05).ahead_s == pytest.approx(0.05)
    work.answered("r1", 60.1, 0)
    assert work.pace(A, 60.1) == 1.0
