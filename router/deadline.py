"""Deadline: how long one client waits for its answer, and the one error that says that it is over.

Owns: checking a timeout, what is left of it, and ending work that takes longer.
Does not: read timeouts from HTTP or gRPC, or free anything; whoever runs the work does.
Invariants: the router's timer and an engine that dropped the request for the same deadline end in the same error;
without a timeout nothing here ends anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from cluster.core.errors import DeadlineExceeded, InvalidRequest

T = TypeVar("T")


def checked_timeout(timeout_s: float) -> float:
    """`timeout_s`, or InvalidRequest. 0 is a deadline that has passed."""
    if not 0 <= timeout_s < float("inf"):
        raise InvalidRequest("timeout_s", "timeout_s must be a finite number of seconds, 0 or more")
    return timeout_s


class Deadline:
    """`timeout_s` counts from now on; None is no deadline. `clock`: monotonic seconds."""

    def __init__(self, timeout_s: float | None, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._at = None if timeout_s is None else clock() + checked_timeout(timeout_s)

    def left_s(self) -> float | None:
        """More than 0, or None without a deadline. DeadlineExceeded once it has passed."""
        if self._at is None:
            return None
        left = self._at - self._clock()
        if left <= 0:
            raise self._passed()
        return left

    async def within(self, work: Awaitable[T]) -> T:
        """The result of `work`; it is cancelled when the deadline passes first."""
        if self._at is None:
            return await work
        try:
            async with asyncio.timeout(self._at - self._clock()) as timer:
                return await work
        except DeadlineExceeded as error:
            raise self._passed() from error  # the engine counts from later on, and would name other seconds
        except TimeoutError:
            if timer.expired():
                raise self._passed() from None
            raise

    def _passed(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the deadline of {self._timeout_s:g} s passed")
