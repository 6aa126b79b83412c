"""TrafficRecorder: tells whoever listens of every request that ends: when it came, how long it was, what it shares.

    front door  --ended-->  recorder  -->  listener (its own key and queue)  -->  Cache.Record

Owns: the listeners, and what leaves the process: chunk hashes only under a listener's key, which nobody sees.
Does not: speak gRPC (router.grpc_api) or write files (cluster.bench.record_command).
Invariants: nothing is kept or hashed while nobody listens; a listener that reads too slowly loses requests, which are
counted, and never holds up an answer. Used on one event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from cluster.core.errors import Overloaded
from cluster.core.hashing import ChunkHash, blinded

MAX_LISTENERS = 4
MAX_QUEUED = 4096  # requests that a listener has not read yet
MAX_QUEUED_CHUNKS = 1 << 18
_KEY_BYTES = 32
_HASHED_AT_ONCE = 4096  # chunks: a few milliseconds of the event loop


class Recorded(NamedTuple):
    """arrived_s: since the listener came.  chunks: one number per whole chunk of the prompt."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    chunks: list[int]


class _Ended(NamedTuple):
    arrived_at: float
    prompt_tokens: int
    output_tokens: int
    hashes: Sequence[ChunkHash]


class Listener:
    """missed: requests that ended without a token, or found the queue full."""

    def __init__(self, since: float) -> None:
        self.missed = 0
        self._since = since
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._queue: deque[_Ended] = deque()
        self._queued_chunks = 0
        self._news = asyncio.Event()

    def tell(self, ended: _Ended) -> None:
        if ended.arrived_at < self._since:
            return  # came before the recording began
        full = len(self._queue) >= MAX_QUEUED or self._queued_chunks >= MAX_QUEUED_CHUNKS
        if full or not ended.output_tokens:
            self.missed += 1
            return
        self._queue.append(ended)
        self._queued_chunks += len(ended.hashes)
        self._news.set()

    async def next(self, timeout_s: float) -> list[Recorded]:
        """What ended since the last call; nothing, when that takes too long."""
        if not self._queue:
            try:
                await asyncio.wait_for(self._news.wait(), timeout_s)
            except TimeoutError:
                return []
        taken: list[_Ended] = []
        chunks = 0
        while self._queue and chunks < _HASHED_AT_ONCE:
            taken.append(self._queue.popleft())
            chunks += len(taken[-1].hashes)
        self._queued_chunks -= chunks
        if not self._queue:
            self._news.clear()
        return [
            Recorded(one.arrived_at - self._since, one.prompt_tokens, one.output_tokens, blinded(self._key, one.hashes))
            for one in taken
        ]


class TrafficRecorder:
    """`clock`: monotonic seconds, the one of the arrivals."""

    def __init__(self, chunk_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.chunk_tokens = chunk_tokens
        self.clock = clock
        self._listeners: list[Listener] = []

    @property
    def listening(self) -> bool:
        return bool(self._listeners)

    @contextmanager
    def listen(self) -> Iterator[Listener]:
        """Overloaded when too many do."""
        if len(self._listeners) >= MAX_LISTENERS:
            raise Overloaded(f"{MAX_LISTENERS} recordings are under way already", retry_after_s=10.0)
        listener = Listener(self.clock())
        self._listeners.append(listener)
        try:
            yield listener
        finally:
            self._listeners.remove(listener)

    def ended(self, arrived_at: float, prompt_tokens: int, output_tokens: int, hashes: Sequence[ChunkHash]) -> None:
        """A request is over, however it ended."""
        for listener in self._listeners:
            listener.tell(_Ended(arrived_at, prompt_tokens, output_tokens, hashes))
