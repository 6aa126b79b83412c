"""BlockLedger: the one way in which block tables take and let go of blocks.

Owns: room judged before anything changes, eviction when free blocks run short, telling the cache of idle blocks, and
reporting all of it to the journal, if there is one.
Does not: know tables or tokens (BlockManager) or choose what to evict (the prefix cache).
Invariants: with no journal an operation costs one comparison more; `lock` and `unlock` leave no entries, because what
they hold is only held until the operation is decided.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker.kvcache.block_journal import BlockAction, BlockJournal
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.prefix_cache import PrefixCache

BlockCopy = tuple[int, int]  # source, target


class BlockLedger:
    """`owner` is the sequence (or pin) that an operation is done for."""

    def __init__(self, pool: BlockPool, cache: PrefixCache | None, journal: BlockJournal | None) -> None:
        self._pool = pool
        self._cache = cache
        self._journal = journal
        self._copies: list[BlockCopy] = []
        if journal is not None:
            pool.watch_evictions()

    def fits(self, count: int, spare: int = 0) -> bool:
        """Whether `count` blocks can be had now, and `spare` more after them."""
        return count + spare <= self._pool.num_free + self._pool.num_evictable

    def take(self, owner: str, count: int) -> list[int]:
        """`count` blocks that `fits` agreed to."""
        if count == 0:
            return []
        missing = count - self._pool.num_free
        if missing > 0 and self._cache is not None:
            self._cache.evict(missing)
            self.note_evictions(owner)
        blocks = self._pool.allocate(count)
        assert blocks is not None, f"{count} blocks were promised, but only {self._pool.num_free} are free"
        if self._journal is not None:
            self._journal.record(BlockAction.ALLOCATE, owner, blocks, self._pool)
        return blocks

    def lock(self, blocks: Sequence[int]) -> None:
        """Keep blocks from eviction until `unlock`, or for good once `note_shared` says so."""
        self._pool.share(blocks)

    def unlock(self, blocks: Sequence[int]) -> None:
        idle = self._pool.release(reversed(blocks))
        if self._cache is not None:
            self._cache.on_idle(idle)

    def share(self, owner: str, blocks: Sequence[int]) -> None:
        self.lock(blocks)
        self.note_shared(owner, blocks)

    def release(self, owner: str, blocks: Sequence[int]) -> None:
        """Last block first: the tail of a chain is worth less than its head."""
        self.unlock(blocks)
        if self._journal is not None:
            self._journal.record(BlockAction.FREE, owner, blocks[::-1], self._pool)

    def copy(self, owner: str, source: int, target: int) -> None:
        """Have the next step copy a block before it writes."""
        self._copies.append((source, target))
        if self._journal is not None:
            self._journal.record_copy(owner, source, target, self._pool)

    def take_copies(self) -> list[BlockCopy]:
        copies, self._copies = self._copies, []
        return copies

    def note_shared(self, owner: str, blocks: Sequence[int]) -> None:
        if self._journal is not None:
            self._journal.record(BlockAction.SHARE, owner, blocks, self._pool)

    def note_evictions(self, owner: str) -> None:
        """Call after everything that lets the cache drop blocks."""
        if self._journal is not None:
            self._journal.record(BlockAction.EVICT, owner, self._pool.take_evicted(), self._pool)

    def end_step(self) -> None:
        if self._journal is not None:
            self._journal.end_step()
