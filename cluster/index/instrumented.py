"""InstrumentedIndex: any ChunkIndex, counted: lookups and their time, hits in tokens, events, records.

Owns: the counters, and telling observers what a worker's cache has lost and gained.
Does not: change an answer, or export metrics (who reads `snapshot` does).
Invariants: every call reaches the index behind it exactly once; counters never fall.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, WorkerId
from cluster.index.base import ChunkIndex


class CountableIndex(ChunkIndex, Protocol):
    """A ChunkIndex that knows its size."""

    def chunk_count(self, worker_id: WorkerId) -> int: ...

    def total_records(self) -> int: ...


class CacheLossObserver(Protocol):
    def lost(self, worker_id: WorkerId, chunk_hashes: Sequence[ChunkHash] | None) -> None:
        """The worker does not hold these chunks any more; None: it holds nothing of what it held."""


class CacheObserver(CacheLossObserver, Protocol):
    def stored(self, worker_id: WorkerId, chunk_hashes: Sequence[ChunkHash]) -> None:
        """The worker holds these chunks now, parents before children."""


class InstrumentedIndex:
    """The `CountableIndex` `index`, measured. Hits are what the best worker holds of a prompt, in tokens per lookup."""

    def __init__(
        self,
        index: CountableIndex,
        chunk_tokens: int,
        *,
        observer: CacheLossObserver | None = None,
        reuse: CacheObserver | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._index = index
        self._chunk_tokens = chunk_tokens
        self._observer = observer
        self._reuse = reuse
        self._timer = timer
        self._lookups = self._query_chunks = self._hit_chunks = 0
        self._lookup_s = self._longest_lookup_s = 0.0
        self._events = dict.fromkeys(CacheEventKind, 0)
        self._event_chunks = dict.fromkeys(CacheEventKind, 0)

    def add_worker(self, worker_id: WorkerId, epoch: Epoch) -> None:
        self._index.add_worker(worker_id, epoch)
        self._tell(worker_id, None)

    def drop_worker(self, worker_id: WorkerId) -> None:
        self._index.drop_worker(worker_id)
        self._tell(worker_id, None)

    def apply(self, worker_id: WorkerId, epoch: Epoch, events: Sequence[CacheEvent]) -> None:
        self._index.apply(worker_id, epoch, events)
        for event in events:
            self._events[event.kind] += 1
            self._event_chunks[event.kind] += len(event.chunk_hashes)
            if event.kind is CacheEventKind.STORED:
                if self._reuse is not None:
                    self._reuse.stored(worker_id, event.chunk_hashes)
            else:
                self._tell(worker_id, event.chunk_hashes if event.kind is CacheEventKind.REMOVED else None)

    def overlaps(self, chunk_hashes: Sequence[ChunkHash]) -> dict[WorkerId, int]:
        began = self._timer()
        found = self._index.overlaps(chunk_hashes)
        took = self._timer() - began
        self._lookups += 1
        self._lookup_s += took
        self._longest_lookup_s = max(self._longest_lookup_s, took)
        self._query_chunks += len(chunk_hashes)
        if found:
            self._hit_chunks += max(found.values())
        return found

    def sweep(self, limit: int) -> bool:
        return self._index.sweep(limit)

    def chunk_count(self, worker_id: WorkerId) -> int:
        return self._index.chunk_count(worker_id)

    def total_records(self) -> int:
        return self._index.total_records()

    def snapshot(self) -> dict[str, float]:
        """Counters since the start, and gauges of now, by metric name."""
        return {
            "kvray_index_lookups": self._lookups,
            "kvray_index_lookup_seconds": self._lookup_s,
            "kvray_index_longest_lookup_seconds": self._longest_lookup_s,
            "kvray_index_query_tokens": self._query_chunks * self._chunk_tokens,
            "kvray_index_hit_tokens": self._hit_chunks * self._chunk_tokens,
            "kvray_index_events": sum(self._events.values()),
            "kvray_index_records": self._index.total_records(),
            **{f"kvray_index_events_{kind}": count for kind, count in self._events.items()},
            **{f"kvray_index_chunks_{kind}": count for kind, count in self._event_chunks.items()},
        }

    def _tell(self, worker_id: WorkerId, chunk_hashes: Sequence[ChunkHash] | None) -> None:
        for observer in (self._observer, self._reuse):
            if observer is not None:
                observer.lost(worker_id, chunk_hashes)
