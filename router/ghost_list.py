"""GhostList: the chunks that replicas evicted lately, so that a miss on one of them can be named.

Owns: a bounded number of chunk hashes with the time of their loss, and when each replica lost all it held.
Does not: know whether a chunk is held elsewhere or again (the index does).
Invariants: bounded in chunks and in workers; the oldest go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from cluster.core.hashing import ChunkHash
from cluster.core.replica import WorkerId

MAX_CHUNKS = 1 << 16  # about 12 MB
_MAX_WORKERS = 1024

K = TypeVar("K", bound=Hashable)


class GhostList:
    """`clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float], *, max_chunks: int = MAX_CHUNKS) -> None:
        self._clock = clock
        self._max_chunks = max_chunks
        self._lost: OrderedDict[ChunkHash, float] = OrderedDict()
        self._emptied: OrderedDict[WorkerId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lost)

    def lost(self, worker_id: WorkerId, chunk_hashes: Sequence[ChunkHash] | None) -> None:
        """As the index's observer hears it; None: all of it."""
        now = self._clock()
        if chunk_hashes is None:
            _put(self._emptied, worker_id, now, _MAX_WORKERS)
            return
        for chunk in chunk_hashes:
            _put(self._lost, chunk, now, self._max_chunks)

    def leading_run(self, chunk_hashes: Sequence[ChunkHash], start: int) -> int:
        """Where the evicted chunks from `start` on end."""
        end = start
        while end < len(chunk_hashes) and chunk_hashes[end] in self._lost:
            end += 1
        return end

    def lost_since(self, worker_id: WorkerId, chunk: ChunkHash | None, at: float) -> bool:
        """Whether the worker lost everything, or somebody this chunk, since then."""
        never = float("-inf")
        when = never if chunk is None else self._lost.get(chunk, never)
        return max(when, self._emptied.get(worker_id, never)) >= at


def _put(into: OrderedDict[K, float], key: K, at: float, limit: int) -> None:
    into[key] = at
    into.move_to_end(key)
    if len(into) > limit:
        into.popitem(last=False)
