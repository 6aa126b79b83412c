"""VirtualLoop: an event loop whose time jumps to the next timer as soon as nothing is ready.

Owns: the loop's clock.
Does not: serve sockets, threads or subprocesses: nothing outside may wake it.
Invariants: time never passes while a callback could run; a loop with neither a timer nor anything ready is an error.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any


class _JumpingSelector(selectors.BaseSelector):
    """Never waits: what the loop would wait for is added to its clock."""

    def __init__(self) -> None:
        self._inner = selectors.DefaultSelector()
        self.now = 1_000_000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._inner.select(0)
        if not ready:
            assert timeout is not None, "the loop would wait for ever"
            self.now += max(0.0, timeout)
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        found: Mapping[Any, selectors.SelectorKey] = self._inner.get_map()
        return found

    def close(self) -> None:
        self._inner.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 1,000,000 and is the clock to hand to what is tested."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now
