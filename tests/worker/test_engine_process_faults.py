"""ProcessEnginePort against children that misbehave: small scripts that speak the protocol, without a model."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_engine as fakes
import pytest
from recording_sink import WAIT_S, RecordingSink

from cluster.config import EngineConfig
from cluster.core.errors import ConfigError, KvrayError, ReplicaLost
from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from worker import engine_process
from worker.engine_process import ProcessEnginePort
from worker.frame import EngineCommand

PRELUDE = f"""
import os, signal, socket, sys, time, msgpack
from cluster.core.replica import ReplicaLoad
from cluster.core.request import FinishReason, TokenDelta
from worker.frame import EngineCommand, EngineFrame
sock = socket.socket(fileno=int(sys.argv[1]))
unpacker = msgpack.Unpacker()
FACTS = {fakes.make_fake_engine().runner.facts.to_wire()!r}
def read():
    while True:
        for message in unpacker:
            return message
        data = sock.recv(65536)
        if not data:
            sys.exit(0)
        unpacker.feed(data)
def write(message):
    sock.sendall(msgpack.packb(message))
def answer():
    request = EngineCommand.from_wire(read()).add
    delta = TokenDelta(
        request_id="a", token_ids=(len(request.prompt_token_ids),), finish_reason=FinishReason.LENGTH
    )
    write(EngineFrame((delta,), (), ReplicaLoad()).to_wire())
start = read()
"""

Start = Callable[[str], tuple[ProcessEnginePort, RecordingSink]]


@pytest.fixture
def make_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ProcessEnginePort]]:
    """A port whose child runs PRELUDE and the given lines instead of `-m worker.engine_main`."""
    ports: list[ProcessEnginePort] = []
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/child.py "$3"\n')
    python.chmod(0o755)

    def make(lines: str) -> ProcessEnginePort:
        (tmp_path / "child.py").write_text(PRELUDE + lines)
        monkeypatch.setattr(sys, "executable", str(python))
        ports.append(ProcessEnginePort(EngineConfig(), "/models/tiny"))
        return ports[-1]

    yield make
    for port in ports:
        port.close()


@pytest.fixture
def start(make_port: Callable[[str], ProcessEnginePort]) -> Start:
    """A port that has started: its child has told its facts."""

    def begin(lines: str) -> tuple[ProcessEnginePort, RecordingSink]:
        port, sink = make_port('write({"facts": FACTS})\n' + lines), RecordingSink()
        assert port.start(sink).eos_token_ids == (fakes.EOS,)
        return port, sink

    return begin


def add(prompt_tokens: int) -> EngineCommand:
    sampling = SamplingParams(max_tokens=1)
    return EngineCommand(
        add=GenerationRequest(request_id="a", prompt_token_ids=(70_000,) * prompt_tokens, sampling=sampling)
    )


def ended(pid: int | None) -> bool:
    """Gone and reaped."""
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_the_child_gets_the_configuration_and_answers_commands(start: Start) -> None:
    port, sink = start(
        "assert start['config']['cache']['block_size'] == 16 and start['model_dir'] == '/models/tiny'\n"
        "while True:\n    answer()\n"
    )
    port.send(add(5))
    assert sink.until_last("a")["a"][0].token_ids == (5,)
    port.close()
    assert ended(port.pid)
    assert sink.exit_reason()


def test_frames_that_come_with_the_facts_are_not_lost(make_port: Callable[[str], ProcessEnginePort]) -> None:
    sink = RecordingSink()
    frame = '[[], [], {"running": 7}]'
    port = make_port(f'sock.sendall(msgpack.packb({{"facts": FACTS}}) + msgpack.packb({frame}))\nread()\n')
    port.start(sink)
    assert sink.next_frame().load.running == 7


def test_an_engine_that_stops_by_itself_tells_why(start: Start) -> None:
    port, sink = start('write({"failed": "AssertionError: ref counts differ"})\n')
    assert sink.exit_reason() == f"engine process {port.pid} ended: AssertionError: ref counts differ"
    assert not port.alive


def test_a_child_that_dies_while_starting_is_a_configuration_error(
    make_port: Callable[[str], ProcessEnginePort],
) -> None:
    port, sink = make_port("os._exit(3)\n"), RecordingSink()
    with pytest.raises(ConfigError, match="exit code 3"):
        port.start(sink)
    assert not port.alive
    assert ended(port.pid)
    assert sink.exits.empty()


def test_an_error_of_the_start_keeps_its_type(make_port: Callable[[str], ProcessEnginePort]) -> None:
    port = make_port('write({"error": {"code": "config", "message": "no room", "details": {"needs": 5}}})\n')
    with pytest.raises(ConfigError, match="no room") as caught:
        port.start(RecordingSink())
    assert caught.value.details == {"needs": 5}
    assert ended(port.pid)


def test_a_child_that_dies_later_is_told_once_and_refuses_commands(start: Start) -> None:
    port, sink = start("read()\nos.kill(os.getpid(), signal.SIGKILL)\n")
    port.send(add(1))
    assert str(port.pid) in sink.exit_reason()
    with pytest.raises(ReplicaLost):
        for _ in range(1000):
            port.send(add(1))
    port.close()
    assert sink.exits.empty()


@pytest.mark.parametrize("junk", ["b'\\xc1'", "msgpack.packb([1, 2])", "msgpack.packb([[['a', [1]]], [], {}])"])
def test_a_child_that_talks_nonsense_is_ended_and_told(start: Start, junk: str) -> None:
    port, sink = start(f"read()\nsock.sendall({junk})\nwhile True:\n    read()\n")
    port.send(add(1))
    reason = sink.exit_reason()
    assert sink.frames.get_nowait() == reason, "no frame came before the end"
    port.close()
    assert ended(port.pid)


def test_send_does_not_wait_for_a_step(start: Start, tmp_path: Path) -> None:
    """The child reads nothing until its step ends; prompts of megabytes must not stop the caller's event loop."""
    port, sink = start(
        "while not os.path.exists(sys.argv[0] + '.go'):\n    time.sleep(0.01)\n"
        "for _ in range(20):\n    answer()\nread()\n"
    )

    def send() -> None:
        for _ in range(20):
            port.send(add(100_000))

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    sender.join(WAIT_S / 4)
    blocked = sender.is_alive()
    (tmp_path / "child.py.go").touch()
    assert not blocked
    for _ in range(20):
        assert sink.next_frame().deltas[0].token_ids == (100_000,)


def test_a_child_that_does_not_end_is_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_EXIT_WAIT_S", 0.1)
    port, sink = start("while True:\n    time.sleep(1)\n")
    port.close()
    assert ended(port.pid)
    assert sink.exit_reason()
    port.close()
    assert sink.exits.empty()


def test_the_child_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    """The parent is killed, so nothing but the closed socket can tell the child."""
    child = tmp_path / "child.py"
    child.write_text(PRELUDE + 'write({"facts": FACTS})\nread()\n')
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {child} "$3"\n')
    python.chmod(0o755)
    parent = (
        "import os, sys\n"
        "from worker.engine_process import ProcessEnginePort\n"
        "from cluster.config import EngineConfig\n"
        f"sys.executable = {str(python)!r}\n"
        "class Sink:\n"
        "    def on_frame(self, frame): pass\n"
        "    def on_exit(self, reason): pass\n"
        "port = ProcessEnginePort(EngineConfig(), 'x')\n"
        "port.start(Sink())\n"
        "print(port.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    # The child shares the pipe: the output ends only when both are gone.
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == -9, done.stderr
    assert done.stdout.strip().isdigit()


def test_before_start_nothing_is_accepted() -> None:
    port = ProcessEnginePort(EngineConfig(), "x")
    assert (port.alive, port.pid) == (False, None)
    with pytest.raises(KvrayError):
        port.send(add(1))
    port.close()
