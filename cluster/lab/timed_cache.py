"""TimedCache: any PrefixCache, with the time that its calls take.

Owns: the sum of the CPU time of lookups, inserts and all else that is asked of the cache.
Does not: change an answer.
Invariants: as the cache inside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from cluster.config import CacheConfig
from cluster.core.events import CacheEvent
from cluster.core.hashing import ChunkHash, RouteScheme
from worker.engine_assembly import prefix_cache
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.prefix_cache import CacheNamespace, PrefixCache, PrefixHit
from worker.runner import ModelFacts

T = TypeVar("T")


class TimedCache:
    def __init__(self, cache: PrefixCache, clock: Callable[[], float] = time.thread_time) -> None:
        self._cache = cache
        self._clock = clock
        self.seconds = 0.0
        self.calls = 0

    @property
    def hit_unit(self) -> int:
        return self._cache.hit_unit

    @property
    def present_chunks(self) -> set[ChunkHash]:
        return self._cache.present_chunks

    @property
    def changes(self) -> int:
        return self._cache.changes

    def match(self, namespace: CacheNamespace, tokens: Sequence[int], *, touch: bool = True) -> PrefixHit:
        return self._timed(lambda: self._cache.match(namespace, tokens, touch=touch))

    def insert(
        self,
        namespace: CacheNamespace,
        tokens: Sequence[int],
        blocks: Sequence[int],
        chunk_hashes: Sequence[ChunkHash],
    ) -> list[int]:
        return self._timed(lambda: self._cache.insert(namespace, tokens, blocks, chunk_hashes))

    def insert_tail(self, namespace: CacheNamespace, tokens: Sequence[int], block_id: int) -> None:
        self._timed(lambda: self._cache.insert_tail(namespace, tokens, block_id))

    def claimed_slots(self, block_id: int) -> int:
        return self._timed(lambda: self._cache.claimed_slots(block_id))

    def on_idle(self, block_ids: Sequence[int]) -> None:
        self._timed(lambda: self._cache.on_idle(block_ids))

    def evict(self, count: int) -> int:
        return self._timed(lambda: self._cache.evict(count))

    def clear(self) -> None:
        self._cache.clear()

    def take_events(self) -> list[CacheEvent]:
        return self._timed(self._cache.take_events)

    def check_invariants(self) -> None:
        self._cache.check_invariants()

    def audit(self) -> Iterator[None]:
        return self._cache.audit()

    def _timed(self, call: Callable[[], T]) -> T:
        started = self._clock()
        try:
            return call()
        finally:
            self.seconds += self._clock() - started
            self.calls += 1


def timed_manager(made: list[TimedCache]) -> Callable[[CacheConfig, ModelFacts, RouteScheme], BlockManager]:
    """A manager around a TimedCache, which is put into `made`."""

    def make(config: CacheConfig, facts: ModelFacts, scheme: RouteScheme) -> BlockManager:
        pool = BlockPool(facts.num_blocks)
        inner = prefix_cache(config, pool, scheme)
        assert inner is not None, "there is no cache to time"
        made.append(TimedCache(inner))
        return BlockManager(pool, made[0], facts.block_size, scheme, facts.kv_fingerprint)

    return make
