"""The engine child's main function, in this process: what it says when its engine stops by itself."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Iterator

import fake_engine as fakes
import pytest

from cluster.config import EngineConfig
from cluster.core.replica import ReplicaLoad
from cluster.core.request import TokenDelta
from worker import engine_main
from worker.engine_wire import MessageSocket
from worker.frame import EngineFrame


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MessageSocket, int]]:
    """The parent's end, on which the child's configuration waits, and the child's descriptor."""
    ours, theirs = socket.socketpair()
    messages = MessageSocket(ours)
    messages.write({"config": EngineConfig().model_dump(), "model_dir": "nowhere"})
    opened: list[MessageSocket] = []

    def open_socket(sock: socket.socket) -> MessageSocket:
        opened.append(MessageSocket(sock))
        return opened[0]

    monkeypatch.setattr(engine_main, "MessageSocket", open_socket)
    monkeypatch.setattr(engine_main, "configure_logging", lambda role: None)
    handler = signal.getsignal(signal.SIGINT)
    yield messages, theirs.detach()
    signal.signal(signal.SIGINT, handler)
    for end in (messages, *opened):  # the child's end closes with its process
        end.close()


def test_wrong_books_are_the_last_message(
    parent: tuple[MessageSocket, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = fakes.make_fake_engine()
    fake.engine._check = False  # as in production: not after every step
    fake.engine._manager._pool._refs[5] = 3  # a leak
    monkeypatch.setattr(engine_main, "build_engine", lambda config, model_dir, warm: (fake.engine, fake.runner.facts))
    messages, fd = parent
    assert engine_main.main(fd) == 1
    facts, frame, failed = messages.read(wait=True) or []
    assert facts["facts"]["num_blocks"] == 32
    assert isinstance(frame, list)
    assert "(5, 3, 0)" in failed["failed"]
    assert [r.name for r in caplog.records if r.levelno == logging.ERROR] == [
        "worker.engine_loop",
        "worker.engine_main",
    ]


def test_the_load_travels_when_it_is_news() -> None:
    ours, theirs = socket.socketpair()
    child, reader = MessageSocket(theirs), MessageSocket(ours)
    now = 0.0
    writer = engine_main.FrameWriter(child, lambda: now)
    delta = TokenDelta(request_id="a", token_ids=(1,))
    idle, busy = ReplicaLoad(free_blocks=9), ReplicaLoad(free_blocks=8, running=1)
    fuller = ReplicaLoad(free_blocks=7, running=1)
    for at, load in [(0.0, idle), (0.01, busy), (0.02, fuller), (0.2, fuller), (0.21, busy), (0.22, idle)]:
        now = at
        writer.emit(EngineFrame((delta,), (), load))
    wires = reader.read(wait=True)
    assert wires is not None
    load, seen = ReplicaLoad(), []
    for wire in wires:
        frame = EngineFrame.from_wire(wire, load)
        assert frame.deltas == (delta,)
        load = frame.load
        seen.append(load)
    assert [wire[2] is not None for wire in wires] == [True, True, False, True, False, True]
    assert seen == [idle, busy, busy, fuller, fuller, idle]
    reader.close()
    child.close()
