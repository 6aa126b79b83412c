"""An EngineSink that keeps what a port tells it, for tests that wait on the port's own thread."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

from cluster.core.request import TokenDelta
from worker.frame import EngineFrame

WAIT_S = 60.0  # a bound on a broken port, never a measure


class RecordingSink:
    """Called on the port's thread, read on the test's. `on_end`: runs inside `on_exit`."""

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        self.frames: queue.SimpleQueue[EngineFrame | str] = queue.SimpleQueue()  # the reason of the end is the last
        self.exits: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._on_end = on_end

    def on_frame(self, frame: EngineFrame) -> None:
        self.frames.put(frame)

    def on_exit(self, reason: str) -> None:
        self._on_end()
        self.frames.put(reason)
        self.exits.put(reason)

    def next_frame(self) -> EngineFrame:
        frame = self.frames.get(timeout=WAIT_S)
        assert isinstance(frame, EngineFrame), f"no more frames: {frame}"
        return frame

    def until_last(self, *request_ids: str) -> dict[str, list[TokenDelta]]:
        """All deltas up to the last one of each of the requests."""
        deltas: dict[str, list[TokenDelta]] = {request_id: [] for request_id in request_ids}
        open_ids = set(request_ids)
        while open_ids:
            for delta in self.next_frame().deltas:
                deltas.setdefault(delta.request_id, []).append(delta)
                if delta.last:
                    open_ids.discard(delta.request_id)
        return deltas

    def exit_reason(self) -> str:
        return self.exits.get(timeout=WAIT_S)


def tokens_of(deltas: Sequence[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]
