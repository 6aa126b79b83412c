"""Deadline: what is left, what it ends, and the one message for every way to be late."""

from __future__ import annotations

import asyncio

import pytest

from cluster.core.errors import DeadlineExceeded, InvalidRequest
from router.deadline import Deadline, checked_timeout


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def raising(error: Exception) -> None:
    raise error


def test_what_is_left_shrinks_until_it_has_passed() -> None:
    clock = Clock()
    deadline = Deadline(2.5, clock)
    assert deadline.left_s() == 2.5
    clock.now += 2
    assert deadline.left_s() == 0.5
    for later in (0.5, 60):
        clock.now += later
        with pytest.raises(DeadlineExceeded, match=r"^the deadline of 2\.5 s passed$"):
            deadline.left_s()


async def test_without_a_timeout_nothing_ends() -> None:
    clock = Clock()
    deadline = Deadline(None, clock)
    clock.now += 1e9
    assert deadline.left_s() is None
    assert await deadline.within(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(DeadlineExceeded, match="the engine's own words"):
        await deadline.within(raising(DeadlineExceeded("the engine's own words")))


def test_a_timeout_of_nothing_has_passed_at_once() -> None:
    with pytest.raises(DeadlineExceeded, match="the deadline of 0 s passed"):
        Deadline(0, Clock()).left_s()


@pytest.mark.parametrize("timeout_s", [-1, -1e-9, float("nan"), float("inf"), float("-inf")])
def test_no_number_of_seconds(timeout_s: float) -> None:
    for check in (checked_timeout, lambda value: Deadline(value, Clock())):
        with pytest.raises(InvalidRequest, match="timeout_s must be") as caught:
            check(timeout_s)
        assert caught.value.field == "timeout_s"


async def test_work_in_time_gives_its_result_and_its_errors() -> None:
    deadline = Deadline(1e300, Clock())
    assert await deadline.within(asyncio.sleep(0, "done")) == "done"
    for error in (KeyError("k"), TimeoutError("of a socket")):  # a timeout of somebody else is not this deadline
        with pytest.raises(type(error)) as caught:
            await deadline.within(raising(error))
        assert caught.value is error


async def test_the_timer_and_a_late_engine_end_in_the_same_error() -> None:
    clock = Clock()
    deadline = Deadline(3, clock)
    with pytest.raises(DeadlineExceeded) as from_engine:
        await deadline.within(raising(DeadlineExceeded("2.9871 s after its arrival", worker_id="a")))
    clock.now += 3
    never = asyncio.Event()
    with pytest.raises(DeadlineExceeded) as from_timer:
        await deadline.within(never.wait())
    assert from_engine.value.to_wire() == from_timer.value.to_wire()
    assert from_timer.value.message == "the deadline of 3 s passed"


async def test_late_work_is_cancelled_before_the_error_is_raised() -> None:
    clock, ended = Clock(), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    deadline = Deadline(1, clock)
    clock.now += 1
    with pytest.raises(DeadlineExceeded):
        await deadline.within(work())
    assert ended == [True]
