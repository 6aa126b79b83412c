"""Server-sent events: a response that streams JSON objects and notices when the client goes away.

Owns: the framing, `EventStream` (the response) and `until_disconnect` (the same care before a response exists).
Does not: know what the objects mean.
Invariants: the source generator is closed however the response ends, and it is only ever advanced by the task
that handles the request; the first event is known before the headers go out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.core.errors import RequestCancelled

DONE = b"data: [DONE]\n\n"

T = TypeVar("T")

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def frame(value: Mapping[str, Any]) -> bytes:
    """One event."""
    return b"data: " + _encode(value).encode("utf-8") + b"\n\n"


class _CancelOnDisconnect:
    """Cancels the current task's block once the client is gone, and ends the block quietly then.

    A single `cancel()`, as in `asyncio.timeout`: a cancel scope would strike again at every await, also at those
    with which generators release what they hold.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.gone = False

    async def __aenter__(self) -> _CancelOnDisconnect:
        task = asyncio.current_task()
        assert task is not None, "requests are handled in tasks"
        self._task = task
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._watcher.cancel()
        if not self.gone:
            return False
        outside = self._task.uncancel() > 0  # someone else wants this task to end, too
        return kind is asyncio.CancelledError and not outside

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._task.cancel()


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, or `RequestCancelled` (and `work` cancelled) once the client has gone away."""
    async with _CancelOnDisconnect(receive):
        return await work
    raise RequestCancelled("the client went away")


class EventStream(Response):
    """Sends the frames of `source`, and closes it at the end, on errors and when the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes, None], *, headers: Mapping[str, str]) -> None:
        # Proxies would otherwise hold events back, and caches keep them.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with _CancelOnDisconnect(receive):
                await self._send_all(send)
        finally:
            await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self._source:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            # How newer ASGI servers report a client that is gone.
            return
