"""EngineClient: an engine's frames, split into what each request gets.

Owns: the table of live requests, which of them are answered late, and handing frames from the port's thread to
the event loop, one wake-up each.
Does not: run the engine, retry, or know Ray.
Invariants: each request ends with one last delta or raises ReplicaLost; leaving it early cancels it; nothing in the
table outlives its caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator

from cluster.core.errors import KvrayError, ReplicaLost
from cluster.core.replica import ReplicaLoad
from cluster.core.request import GenerationRequest, TokenDelta
from worker.delta_sink import DeltaSink
from worker.engine_port import EnginePort
from worker.frame import EngineCommand, EngineFrame, EngineMode
from worker.late_answers import LateAnswers
from worker.runner import ModelFacts

logger = logging.getLogger(__name__)


class EngineClient:
    """Create inside a running event loop. `on_frame` sees every frame, `on_exit` the engine's end, on that loop."""

    def __init__(
        self,
        port: EnginePort,
        on_frame: Callable[[EngineFrame], None] | None = None,
        on_exit: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        late_answers: LateAnswers | None = None,
    ) -> None:
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, _Stream] = {}
        self._observe = on_frame
        self._observe_exit = on_exit
        self._lost: str | None = None
        self._closing = False
        self._ended = asyncio.Event()  # some stream, or the engine
        self._clock = clock
        self.load = ReplicaLoad()
        self.late_answers = LateAnswers() if late_answers is None else late_answers

    async def start(self) -> ModelFacts:
        facts = await asyncio.to_thread(self._port.start, _LoopSink(self, self._loop))
        if not self.load.total_blocks:  # no frame yet: an engine that has done nothing has all its blocks
            self.load = ReplicaLoad(free_blocks=facts.num_blocks, total_blocks=facts.num_blocks)
        return facts

    @property
    def alive(self) -> bool:
        return self._lost is None and self._port.alive

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Deltas of one request. A refused request raises its typed error; a dead engine raises ReplicaLost."""
        deltas: asyncio.Queue[TokenDelta] = asyncio.Queue()
        with self._running(request, deltas.put_nowait):
            last = False
            while not last:
                delta = await deltas.get()
                last = delta.last
                if delta.error is not None:
                    raise delta.error
                yield delta

    async def pump(self, request: GenerationRequest, sink: DeltaSink) -> None:
        """Hand all deltas of one request to `sink`, its error too; then close it. ReplicaLost: one of both is gone."""
        try:
            with self._running(request, sink.put):
                await sink.ended()
        finally:
            sink.close()

    def pause(self) -> None:
        """Run nothing from the next step on: requests keep their blocks and places, new ones still queue."""
        self._port.send(EngineCommand(mode=EngineMode.PAUSE))

    def resume(self) -> None:
        """Go on, and take requests again."""
        self._port.send(EngineCommand(mode=EngineMode.RESUME))

    async def drain(self) -> None:
        """Refuse new requests and return when the answers that are under way are complete. ReplicaLost if it dies."""
        self._port.send(EngineCommand(mode=EngineMode.DRAIN))
        under_way = dict(self._streams)  # those that come now are refused
        while any(self._streams.get(name) is stream for name, stream in under_way.items()):
            if self._lost is not None:
                raise ReplicaLost(self._lost)
            self._ended.clear()
            await self._ended.wait()

    def end_all(self, error: KvrayError) -> int:
        """End every answer that is under way with `error`; returns how many that were."""
        live = [(request_id, stream) for request_id, stream in self._streams.items() if not stream.ended]
        for request_id, stream in live:
            stream.take(TokenDelta(request_id=request_id, error=error))
            with contextlib.suppress(ReplicaLost):
                self._port.send(EngineCommand(cancel=request_id))
        return len(live)

    async def close(self) -> None:
        self._closing = True
        await asyncio.to_thread(self._port.close)

    def deliver(self, frame: EngineFrame) -> None:
        self.load = frame.load
        for delta in frame.deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None and not stream.ended:
                if delta.token_ids and not stream.answered:
                    stream.answered = True
                    self.late_answers.note(self._clock() - stream.began_at)
                stream.take(delta)
        if self._observe is not None:
            self._observe(frame)

    def deliver_exit(self, reason: str) -> None:
        self._lost = reason
        self._ended.set()
        for request_id, stream in self._streams.items():
            if not stream.ended:
                stream.take(TokenDelta(request_id=request_id, error=ReplicaLost(f"the engine is gone: {reason}")))
        if self._observe_exit is not None and not self._closing:
            self._observe_exit(reason)

    @contextlib.contextmanager
    def _running(self, request: GenerationRequest, put: Callable[[TokenDelta], None]) -> Iterator[None]:
        """The request is the engine's inside the block, and cancelled when the block ends before the answer does."""
        if self._lost is not None:
            raise ReplicaLost(self._lost)
        stream = self._streams[request.request_id] = _Stream(put, self._clock())
        try:
            self._port.send(EngineCommand(add=request))
            yield
        finally:
            if self._streams.get(request.request_id) is stream:
                del self._streams[request.request_id]
                self._ended.set()
            if not stream.ended:
                with contextlib.suppress(ReplicaLost):  # a dead engine has nothing to cancel
                    self._port.send(EngineCommand(cancel=request.request_id))


class _Stream:
    """One live request: who takes its deltas, and whether the last one came."""

    __slots__ = ("_put", "answered", "began_at", "ended")

    def __init__(self, put: Callable[[TokenDelta], None], began_at: float) -> None:
        self._put = put
        self.began_at = began_at
        self.answered = False
        self.ended = False

    def take(self, delta: TokenDelta) -> None:
        self.ended = self.ended or delta.last
        self._put(delta)


class _LoopSink:
    """EngineSink that moves every callback onto the client's event loop."""

    def __init__(self, client: EngineClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def on_frame(self, frame: EngineFrame) -> None:
        self._post(self._client.deliver, frame)

    def on_exit(self, reason: str) -> None:
        self._post(self._client.deliver_exit, reason)

    def _post(self, callback: Callable[..., None], value: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, value)
        except RuntimeError:
            logger.debug("the event loop is closed; an engine message is dropped")
