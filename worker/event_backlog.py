"""EventBacklog: what the cache holds, and which of its changes are not published yet.

Owns: the mirror of the cache, the queue of pending events, cutting the queue into batches.
Does not: publish, number or time anything (worker.cache_reporter).
Invariants: the mirror lists parents before children; old published state + pending events = the mirror, unless the
queue was discarded; the queue is discarded once it outgrows the mirror by `max_pending_chunks`.
"""

from __future__ import annotations

from collections import deque

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.index.base import MAX_CHUNKS_PER_ENTRY

_MAX_EVENTS_PER_BATCH = 1024


class EventBacklog:
    """Starts discarded: nothing is queued until `restart()`."""

    def __init__(self, max_pending_chunks: int) -> None:
        self._max_pending_chunks = max_pending_chunks
        self._mirror: dict[ChunkHash, None] = {}
        self._pending: deque[CacheEvent] = deque()
        self._pending_chunks = 0
        self._discarded = True

    def __bool__(self) -> bool:
        """Something is pending."""
        return bool(self._pending)

    @property
    def chunks(self) -> list[ChunkHash]:
        """What the cache holds, parents before children."""
        return list(self._mirror)

    @property
    def pending_chunks(self) -> int:
        return self._pending_chunks

    def record(self, event: CacheEvent) -> bool:
        """Take in a change. False when the queue overflowed: it is discarded, only the mirror is kept."""
        if event.kind is CacheEventKind.STORED:
            self._mirror.update(dict.fromkeys(event.chunk_hashes))
        elif event.kind is CacheEventKind.REMOVED:
            for chunk in event.chunk_hashes:
                self._mirror.pop(chunk, None)
        else:
            self._mirror.clear()
            self._empty()  # what came before a clear no longer matters
        if self._discarded:
            return True
        self._append(event)
        if self._pending_chunks > len(self._mirror) + self._max_pending_chunks:
            self.discard()
            return False
        return True

    def discard(self) -> None:
        """Queue nothing from here on: the published state is lost, and the whole mirror will have to be sent."""
        self._empty()
        self._discarded = True

    def restart(self) -> None:
        """The published state is empty: queue the mirror, and every change from here on."""
        self._empty()
        self._discarded = False
        held = self.chunks
        for start in range(0, len(held), MAX_CHUNKS_PER_ENTRY):
            self._append(CacheEvent(CacheEventKind.STORED, tuple(held[start : start + MAX_CHUNKS_PER_ENTRY])))

    def take(self) -> list[CacheEvent]:
        """Remove up to one entry's worth of events from the front; the last one may be split."""
        batch: list[CacheEvent] = []
        room = MAX_CHUNKS_PER_ENTRY
        while self._pending and len(batch) < _MAX_EVENTS_PER_BATCH and room > 0:
            event = self._pending.popleft()
            if len(event.chunk_hashes) > room:
                self._pending.appendleft(CacheEvent(event.kind, event.chunk_hashes[room:]))
                event = CacheEvent(event.kind, event.chunk_hashes[:room])
            room -= len(event.chunk_hashes)
            batch.append(event)
        self._pending_chunks -= MAX_CHUNKS_PER_ENTRY - room
        return batch

    def _append(self, event: CacheEvent) -> None:
        """Queue an event, joined to the one before it when they are of one kind."""
        if event.kind is not CacheEventKind.CLEARED and not event.chunk_hashes:
            return
        self._pending_chunks += len(event.chunk_hashes)
        last = self._pending[-1] if self._pending else None
        if last is not None and last.kind is event.kind:
            joined = last.chunk_hashes + event.chunk_hashes
            if len(joined) <= MAX_CHUNKS_PER_ENTRY:
                self._pending[-1] = CacheEvent(event.kind, joined)
                return
        self._pending.append(event)

    def _empty(self) -> None:
        self._pending.clear()
        self._pending_chunks = 0
