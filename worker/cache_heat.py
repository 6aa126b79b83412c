"""CacheHeat: how much a replica's cache was of use lately: the tokens found in it, those of long ago forgotten.

Owns: this measure.
Does not: read clocks, or decide who stops (cluster.coldest_victim).
Invariants: 0 or more; it halves in `_HALF_LIFE_S` without hits; it changes in steps, because Serve tells every router
of each change.
"""

from __future__ import annotations

import math

_HALF_LIFE_S = 300.0


class CacheHeat:
    def __init__(self) -> None:
        self._tokens = 0.0
        self._hits = 0
        self._at_s: float | None = None

    def level(self, now: float, hit_tokens: int) -> float:
        """`hit_tokens`: since the engine started. On a scale on which 1 more is twice as much, in halves."""
        if self._at_s is not None:
            self._tokens *= 0.5 ** ((now - self._at_s) / _HALF_LIFE_S)
        self._tokens += max(hit_tokens - self._hits, 0)
        self._at_s, self._hits = now, hit_tokens
        return round(2 * math.log2(1.0 + self._tokens)) / 2
