"""Times on a machine that has other work: of ten stretches, the quietest.

Owns: Stopwatch, resident_bytes and python_call_ns.
Does not: import anything but the standard library.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

STRETCHES = 10


class Percentiles(NamedTuple):
    p50: float
    p99: float

    def __str__(self) -> str:
        return f"{self.p50:,.0f} / {self.p99:,.0f}"


class Stopwatch:
    """Seconds of each call; CPU time of the thread unless another clock is given."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self.seconds = array("d")  # no objects: they would hold memory pools that what is measured gives back

    def __call__(self, call: Callable[[], object]) -> None:
        started = self._clock()
        call()
        self.seconds.append(self._clock() - started)

    def microseconds(self) -> Percentiles:
        """Of the stretch with the lowest median."""
        size = max(len(self.seconds) // STRETCHES, 1)
        stretches = [sorted(self.seconds[at : at + size]) for at in range(0, size * STRETCHES, size)]
        best = min((one for one in stretches if one), key=lambda one: one[len(one) // 2])
        return Percentiles(1e6 * best[len(best) // 2], 1e6 * best[int(len(best) * 0.99)])


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def python_call_ns() -> float:
    """What a loop turn with one Python call costs here and now, to compare runs and machines by."""

    def same(n: int) -> int:
        return n

    watch = Stopwatch()
    for _ in range(50):
        watch(lambda: [same(n) for n in range(10_000)])
    return watch.microseconds().p50 / 10_000 * 1000
