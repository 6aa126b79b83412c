"""The engine child's main function, in this process: what it says when its engine stops by itself."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Iterator

import fake_engine as fakes
import pytest

from cluster.config import EngineConfig
from worker import engine_main
from worker.engine_wire import MessageSocket


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
    monkeypatch.setattr(engine_main, "build_engine", lambda config, model_dir: (fake.engine, fake.runner.facts))
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
