"""WindowExtreme: the largest value of the last while, in constant time per value.

Owns: the values that can still become the largest, in falling order.
Does not: read clocks; times come with the values and never go back.
Invariants: a value counts for `window_s` after it came; the newest always counts.
"""

from __future__ import annotations

from collections import deque


class WindowExtreme:
    """Push negated values for the smallest."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._falling: deque[tuple[float, float]] = deque()

    def __len__(self) -> int:
        return len(self._falling)

    def push(self, now: float, value: float) -> float:
        """The largest, this one included."""
        falling = self._falling
        while falling and falling[-1][1] <= value:
            falling.pop()
        falling.append((now, value))
        while falling[0][0] < now - self._window_s:
            falling.popleft()
        return falling[0][1]
