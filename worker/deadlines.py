"""Deadlines: which requests nobody waits for any more.

Owns: the deadlines of live requests, in the engine's clock.
Does not: end requests (engine).
Invariants: a request is told of at most once; one that ended, or came again under its id, is not told of by an old
deadline; memory is bounded by the live requests that have one.
"""

from __future__ import annotations

import heapq


class Deadlines:
    """Times in seconds of one clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._by_id: dict[str, float] = {}

    def set(self, request_id: str, at: float) -> None:
        self._by_id[request_id] = at
        heapq.heappush(self._heap, (at, request_id))
        if len(self._heap) > 2 * len(self._by_id) + 64:
            self._heap = [(at, request_id) for request_id, at in self._by_id.items()]
            heapq.heapify(self._heap)

    def clear(self, request_id: str) -> None:
        """It ended, or has none."""
        self._by_id.pop(request_id, None)

    def next(self) -> float | None:
        """When the next one passes."""
        while self._heap and self._by_id.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def passed(self, now: float) -> list[str]:
        """Requests whose deadline is over, earliest first; they are forgotten here."""
        late: list[str] = []
        while (at := self.next()) is not None and at <= now:
            late.append(heapq.heappop(self._heap)[1])
            del self._by_id[late[-1]]
        return late
