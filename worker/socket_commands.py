"""SocketCommands: the engine child's commands, out of its socket, with a way to be woken by other threads.

Owns: waiting for the socket or a call of `wake`, whichever comes first.
Does not: own the socket, or execute commands (engine_loop).
Invariants: those of CommandSource; a call of `wake` is never lost, and costs a loop that is busy nothing.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Sequence

from worker.engine_wire import MessageSocket
from worker.frame import EngineCommand


class SocketCommands:
    """`drain` is for one thread, `wake` for all."""

    def __init__(self, messages: MessageSocket) -> None:
        self._messages = messages
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(messages, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def drain(self, *, wait: bool, timeout_s: float | None = None) -> Sequence[EngineCommand] | None:
        if wait:
            self._selector.select(timeout_s)
            with contextlib.suppress(BlockingIOError):
                while self._woken.recv(4096):
                    pass
        messages = self._messages.read(wait=False)
        return None if messages is None else [EngineCommand.from_wire(m) for m in messages]

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody waits any more
            self._waker.send(b"\0")

    def close(self) -> None:
        self._selector.close()
        self._woken.close()
        self._waker.close()
