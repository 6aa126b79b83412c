"""PortStranger: somebody else on this machine, on ports that he would share, as gRPC servers do by default."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from types import TracebackType

_HOST = "127.0.0.1"


class PortStranger:
    """`count` ports in a row. He answers nobody, so a request that comes to him does not end."""

    def __init__(self, count: int) -> None:
        self._sockets = _neighbours(count)
        first = self._sockets[0].getsockname()[1]
        self.ports = range(first, first + count)

    def connections(self) -> int:
        """How many came to him since the last call."""
        return sum(1 for sock in self._sockets for _ in _accepted(sock))

    def __enter__(self) -> PortStranger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sock in self._sockets:
            sock.close()


def _neighbours(count: int) -> list[socket.socket]:
    for _ in range(100):
        first = _listener(0)
        sockets = [first]
        try:
            sockets += [_listener(first.getsockname()[1] + place) for place in range(1, count)]
        except (OSError, OverflowError):  # the next one is taken, or there is none
            for sock in sockets:
                sock.close()
            continue
        return sockets
    raise AssertionError(f"no {count} free ports in a row")


def _listener(port: int) -> socket.socket:
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket())
        if port:  # nobody's, before it is shared: else somebody would lose requests to us
            with socket.socket() as alone:
                alone.bind((_HOST, port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((_HOST, port))
        sock.listen()
        sock.setblocking(False)
        undo.pop_all()
        return sock


def _accepted(sock: socket.socket) -> Iterator[None]:
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.accept()[0].close()
            yield
