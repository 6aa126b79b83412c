"""VirtualClock: the time of a simulation, in seconds from 0.

Owns: the current time.
Does not: decide what takes how long (virtual_runner) or when something arrives (engine_simulation).
Invariants: time never goes back.
"""

from __future__ import annotations


class VirtualClock:
    """Call it to read it, like time.monotonic."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0.0, f"time cannot go back by {-seconds} s"
        self.now += seconds

    def jump_to(self, time_s: float) -> None:
        """Nothing when that time has passed."""
        self.now = max(self.now, time_s)
