"""EnginePeer: the engine alone as a peer, in a child process of its own.

Owns: the child's life and the lines that go to it and come back.
Does not: run a model in this process, or take times; the child does, so that pipes cost its answers nothing.
Invariants: `stop` ends the child whatever state it is in; when the child is gone every waiting request fails.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.bench.peer import PeerFacts, TimedAnswer
from cluster.config import EngineConfig
from cluster.core.errors import ConfigError, KvrayError

_LINE_BYTES = 2**22
_STOP_S = 20.0


def engine_command(config: EngineConfig, model_dir: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "cluster.bench.engine_child", str(model_dir), config.model_dump_json())


class EnginePeer:
    """Start it with `EnginePeer.launch`; `facts.start_s` is the time from there to the engine's readiness."""

    can_defeat_cache = True
    is_local = True

    def __init__(self, process: asyncio.subprocess.Process, facts: PeerFacts) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.facts = facts
        self._process = process
        self._requests = process.stdin
        self._replies = process.stdout
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = itertools.count()
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def launch(cls, command: Sequence[str], model: str, timeout_s: float = 600.0) -> EnginePeer:
        """ConfigError says why the engine did not start."""
        started = time.monotonic()
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, limit=_LINE_BYTES, start_new_session=True
        )
        facts = PeerFacts(name="engine", kind="engine", address="", model=model, pid=process.pid)
        peer = cls(process, facts)
        try:
            async with asyncio.timeout(timeout_s):
                await peer._wait_ready(started)
        except BaseException as error:
            await peer.stop()
            if isinstance(error, TimeoutError):
                raise ConfigError(f"the engine was not ready after {timeout_s:.0f} s") from None
            raise
        return peer

    async def complete(self, prompt: str, max_tokens: int, *, caching: bool) -> TimedAnswer:
        if self._reader is None or self._reader.done():
            raise KvrayError("the engine's process has ended")
        number = next(self._ids)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"id": number, "prompt": prompt, "max_tokens": max_tokens, "caching": caching})
            message = await reply
        except asyncio.CancelledError:
            with suppress(ConnectionError):  # or it would go on beside the next peer's run
                await self._send({"cancel": number})
            raise
        except ConnectionError:
            raise KvrayError("the engine's process has ended") from None
        finally:
            self._waiting.pop(number, None)
        if "answer" not in message:
            raise KvrayError(message["error"])
        return TimedAnswer(**message["answer"])

    async def stop(self) -> None:
        with suppress(ConnectionError):
            self._requests.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._reader is not None:
            await self._reader

    async def _wait_ready(self, started: float) -> None:
        line = await self._replies.readline()
        message = json.loads(line) if line else {"failed": f"its process ended with {await self._process.wait()}"}
        if "failed" in message:
            raise ConfigError(f"the engine did not start: {message['failed']}")
        self.facts = replace(self.facts, start_s=time.monotonic() - started)
        self._reader = asyncio.create_task(self._read())

    async def _send(self, message: dict[str, Any]) -> None:
        self._requests.write(f"{json.dumps(message)}\n".encode())
        await self._requests.drain()

    async def _read(self) -> None:
        try:
            while line := await self._replies.readline():
                message = json.loads(line)
                reply = self._waiting.get(message["id"])
                if reply is not None and not reply.done():
                    reply.set_result(message)
        finally:
            for reply in self._waiting.values():
                if not reply.done():
                    reply.set_exception(KvrayError("the engine's process has ended"))
