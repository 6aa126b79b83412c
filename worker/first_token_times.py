"""FirstTokenTimes: how long the latest requests waited for their first token.

Owns: a bounded window of these times, and its p90.
Does not: read clocks, or know requests (engine_client).
Invariants: what is older than the window counts no more; memory is bounded.
"""

from __future__ import annotations

import math
from collections import deque

_WINDOW_S = 60.0
_MOST = 512


class FirstTokenTimes:
    def __init__(self) -> None:
        self._times: deque[tuple[float, float]] = deque(maxlen=_MOST)  # when it came, after how long

    def note(self, now: float, seconds: float) -> None:
        self._times.append((now, seconds))

    def p90(self, now: float) -> float:
        """0 when there were none."""
        while self._times and self._times[0][0] < now - _WINDOW_S:
            self._times.popleft()
        if not self._times:
            return 0.0
        ordered = sorted(seconds for _, seconds in self._times)
        return ordered[math.ceil(0.9 * len(ordered)) - 1]
