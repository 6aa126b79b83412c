"""The socket between a replica process and its engine child: msgpack messages, read without threads.

Owns: the blocking rules of one end of the socketpair.
Does not: know what the messages mean, or how they are packed (cluster.framing).
Invariants: messages arrive whole and in order; a closed peer reads as None, never as an exception.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from cluster.framing import MessagePacker, MessageReader

_READ_BYTES = 1 << 16
_MAX_MESSAGE_BYTES = 1 << 30


class MessageSocket:
    """One end of a stream socket. `read` and `write` may be used from different threads, one each."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(True)
        self._reader = MessageReader(_MAX_MESSAGE_BYTES)
        self._packer = MessagePacker()

    def write(self, message: Any) -> bool:
        """False when the peer is gone."""
        try:
            self._sock.sendall(self._packer.pack(message))
        except OSError:
            return False
        return True

    def read(self, *, wait: bool) -> list[Any] | None:
        """All complete messages; with `wait`, at least one. None when the peer is gone."""
        messages: list[Any] = self._reader.take()
        while True:
            data = self._receive(wait=wait and not messages)
            if data is None:
                return messages
            if not data:
                return messages or None  # what came before the end is still delivered
            self._reader.feed(data)
            messages += self._reader.take()
            if messages and len(data) < _READ_BYTES:
                return messages  # no more was there; asking again would cost a system call per step

    def fileno(self) -> int:
        """For selectors. What `read` left behind is at most a part of a message, so there is something to read again
        only once more has come."""
        return self._sock.fileno()

    def close(self) -> None:
        # shutdown wakes a reader that blocks in another thread; close alone would not
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _receive(self, *, wait: bool) -> bytes | None:
        """None when nothing is there yet, b"" at the end, also when `close` was called meanwhile."""
        try:
            return self._sock.recv(_READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""
