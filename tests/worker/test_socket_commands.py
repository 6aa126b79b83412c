"""SocketCommands: commands out of a socket, and being woken by another thread instead."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from worker.engine_wire import MessageSocket
from worker.frame import EngineCommand
from worker.socket_commands import SocketCommands


class Pair:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.parent = MessageSocket(ours)
        self.child = MessageSocket(theirs)
        self.commands = SocketCommands(self.child)

    def send(self, *ids: str) -> None:
        for request_id in ids:
            assert self.parent.write(EngineCommand(cancel=request_id).to_wire())


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.commands.close()
    pair.parent.close()
    pair.child.close()


def later(call: object) -> None:
    timer = threading.Timer(0.05, call)  # type: ignore[arg-type]
    timer.daemon = True
    timer.start()


def test_all_commands_that_are_there_come_at_once(pair: Pair) -> None:
    assert pair.commands.drain(wait=False) == []
    pair.send("a", "b")
    assert pair.commands.drain(wait=True) == [EngineCommand(cancel="a"), EngineCommand(cancel="b")]
    later(lambda: pair.send("c"))
    assert pair.commands.drain(wait=True) == [EngineCommand(cancel="c")]


def test_waking_ends_a_wait_once(pair: Pair) -> None:
    later(pair.commands.wake)
    started = time.monotonic()
    assert pair.commands.drain(wait=True) == []
    assert time.monotonic() - started >= 0.04
    later(lambda: pair.send("a"))
    assert pair.commands.drain(wait=True) == [EngineCommand(cancel="a")], "the next one waits again"


def test_a_wake_that_comes_before_the_wait_is_not_lost(pair: Pair) -> None:
    for _ in range(100_000):  # more than the socket takes
        pair.commands.wake()
    assert pair.commands.drain(wait=False) == []
    assert pair.commands.drain(wait=True) == []


def test_a_closed_parent_ends_it(pair: Pair) -> None:
    later(pair.parent.close)
    assert pair.commands.drain(wait=True) is None
    pair.commands.close()
    pair.commands.wake()
