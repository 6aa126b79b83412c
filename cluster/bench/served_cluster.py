"""ServedCluster: `kvray serve` in a child process, as a user would start it.

Owns: the child, its free ports, its log, and its end.
Does not: start anything by itself (the child's launcher does), or send requests (http_peer).
Invariants: `stop` interrupts the child and waits until it has stopped all it started; what it printed is shown only
when it did not start.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress

import aiohttp

from cluster.core.errors import ConfigError
from cluster.free_ports import free_ports

_STOP_S = 90.0
_POLL_S = 0.1


class ServedCluster:
    """One replica. `options`: further options of `kvray serve`."""

    def __init__(self, options: Sequence[str]) -> None:
        port, grpc_port = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self.start_s = 0.0
        ports = ("--port", str(port), "--grpc-port", str(grpc_port))
        self._command = (sys.executable, "-m", "cluster.cli", "serve", "--replicas", "1", *ports, *options)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives until `stop`
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, http: aiohttp.ClientSession, timeout_s: float = 600.0) -> None:
        """Returns when it answers ready. ConfigError ends with the last line it printed."""
        started = time.monotonic()
        # Its own session: a Ctrl-C must end the runs first, and the server when they have ended.
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        while not await self._is_ready(http):
            if self._process.returncode is not None:
                raise ConfigError(f"kvray serve did not start: {self._last_line()}")
            if time.monotonic() - started > timeout_s:
                raise ConfigError(f"kvray serve was not ready after {timeout_s:.0f} s: {self._last_line()}")
            await asyncio.sleep(_POLL_S)
        self.start_s = time.monotonic() - started

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)
            try:
                async with asyncio.timeout(_STOP_S):
                    await self._process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                await self._process.wait()
        self._log.close()

    async def _is_ready(self, http: aiohttp.ClientSession) -> bool:
        try:
            async with http.get(f"{self.url}/ready", timeout=aiohttp.ClientTimeout(total=5)) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
