"""ParityWatch: does an engine reuse what it was chosen for?

    routed for an overlap -> first token: cached_tokens > 0                              as it should be
                                          cached_tokens = 0, the chunk lost in between   evicted
                                          cached_tokens = 0 -> lost within `wait_s`      the index was late
                                                            -> not                       PARITY MISS

A parity miss means that router and engine do not see the same tokens or hashes, and that routing by prefix is worth
nothing, silently. Whether the cache lost the prompt's first chunk decides: a cache is closed under prefix, so without
the first chunk nothing can be reused, and with it something is.

Owns: what routed requests were promised, the verdicts, and the one warning a minute.
Does not: route, or keep text or tokens.
Invariants: every promise ends in at most one counter; a chunk that was lost and stored again counts as lost; nothing is
kept of a request that was released, but a suspicion for `wait_s`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.core.hashing import ChunkHash
from cluster.core.replica import WorkerId

logger = logging.getLogger(__name__)

WAIT_S = 2.0
_LOG_EVERY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Why a request went to a worker. `confirmed`: by the worker's own events, not only by what it was sent before."""

    request_id: str
    worker_id: WorkerId
    first_chunk: ChunkHash
    prompt_tokens: int
    overlap_tokens: int
    confirmed: bool


@dataclass(slots=True)
class ParityCounters:
    """checks: promises that were answered.  misses, evicted, index_late: of confirmed ones, by reason.

    unfulfilled: nothing was reused of what was only expected to be there.
    """

    checks: int = 0
    misses: int = 0
    evicted: int = 0
    index_late: int = 0
    unfulfilled: int = 0


class ParityWatch:
    """The index's `CacheLossObserver`; used on one event loop. `clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float], *, wait_s: float = WAIT_S) -> None:
        self.counters = ParityCounters()
        self._clock = clock
        self._wait_s = wait_s
        self._promises: dict[str, Promise] = {}
        self._by_chunk: dict[WorkerId, dict[ChunkHash, dict[str, Promise]]] = {}
        self._broken: set[str] = set()  # request ids whose first chunk was lost since they were routed
        self._suspects: dict[str, float] = {}  # request id -> when the verdict falls, in that order
        self._num_unlogged = 0
        self._unlogged: Promise | None = None  # the latest of them
        self._next_log = float("-inf")

    def __len__(self) -> int:
        """Promises without a verdict."""
        return len(self._promises)

    def expect(self, promise: Promise) -> None:
        """The request goes to this worker for this overlap. Replaces an earlier promise."""
        self.forget(promise.request_id)
        self._promises[promise.request_id] = promise
        of_worker = self._by_chunk.setdefault(promise.worker_id, {})
        of_worker.setdefault(promise.first_chunk, {})[promise.request_id] = promise

    def answered(self, request_id: str, cached_tokens: int | None) -> None:
        """Its first token is here, with what the engine reused; None: the engine did not say."""
        self._settle()
        promise = self._promises.get(request_id)
        if promise is None or request_id in self._suspects:
            return
        if cached_tokens is not None:
            self.counters.checks += 1
        if cached_tokens != 0:
            self._end(promise)
        elif not promise.confirmed:
            self.counters.unfulfilled += 1
            self._end(promise)
        elif request_id in self._broken:
            self.counters.evicted += 1
            self._end(promise)
        else:
            self._suspects[request_id] = self._clock() + self._wait_s

    def forget(self, request_id: str) -> None:
        """The request ended. A suspicion stays until its verdict."""
        promise = self._promises.get(request_id)
        if promise is not None and request_id not in self._suspects:
            self._end(promise)

    def lost(self, worker_id: WorkerId, chunk_hashes: Sequence[ChunkHash] | None) -> None:
        of_worker = self._by_chunk.get(worker_id)
        if not of_worker:
            return
        self._settle()
        for chunk in tuple(of_worker) if chunk_hashes is None else chunk_hashes:
            for request_id, promise in tuple(of_worker.get(chunk, {}).items()):
                if request_id in self._suspects:
                    self.counters.index_late += 1
                    self._end(promise)
                else:
                    self._broken.add(request_id)

    def snapshot(self) -> dict[str, float]:
        """Counters by metric name."""
        self._settle()
        return {
            "kvray_parity_checks": self.counters.checks,
            "kvray_parity_misses": self.counters.misses,
            "kvray_parity_evicted": self.counters.evicted,
            "kvray_parity_index_late": self.counters.index_late,
            "kvray_parity_unfulfilled": self.counters.unfulfilled,
        }

    def _settle(self) -> None:
        """Pronounce the verdicts that are due."""
        if not self._suspects and self._unlogged is None:
            return
        now = self._clock()
        while self._suspects:
            request_id, due = next(iter(self._suspects.items()))
            if due > now:
                break
            promise = self._promises[request_id]
            self.counters.misses += 1
            self._num_unlogged += 1
            self._unlogged = promise
            self._end(promise)
        if self._unlogged is not None and now >= self._next_log:
            self._warn(self._unlogged)
            self._unlogged, self._num_unlogged = None, 0
            self._next_log = now + _LOG_EVERY_S

    def _warn(self, latest: Promise) -> None:
        logger.warning(
            "parity miss: a request of %d tokens was routed to %s for the %d it holds, and the engine reused none "
            "(%d such since the last warning)",
            latest.prompt_tokens,
            latest.worker_id,
            latest.overlap_tokens,
            self._num_unlogged,
        )

    def _end(self, promise: Promise) -> None:
        request_id, of_worker = promise.request_id, self._by_chunk[promise.worker_id]
        del self._promises[request_id]
        self._broken.discard(request_id)
        self._suspects.pop(request_id, None)
        of_chunk = of_worker[promise.first_chunk]
        del of_chunk[request_id]
        if not of_chunk:
            del of_worker[promise.first_chunk]
            if not of_worker:
                del self._by_chunk[promise.worker_id]
