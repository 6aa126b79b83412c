"""BlockManager: the scheduler's only view of KV memory.

A sequence's tokens, and who owns the KV of each range:

    [0, cached)          found in the tree at `allocate`, shared with it and with other sequences
    [cached, committed)  computed by this sequence, whole blocks, in the tree since `commit`
    [committed, computed) computed, in blocks that only this sequence holds
    [computed, reserved) slots reserved, nothing written yet

Owns: the block table of every live sequence; admission arithmetic; evicting when blocks run short.
Does not: touch tensors or decide which sequence waits or is preempted (scheduler).
Invariants: a refused `allocate` or `append_token` changes no ref count; hit blocks are locked before capacity is
judged, so a request never evicts its own prefix; a freed sequence leaves nothing behind but cached blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.core.events import CacheEvent
from cluster.core.hashing import ChunkHash, RouteScheme, hash_chunk, root_hash
from worker.kvcache.block_pool import BlockCounts, BlockPool
from worker.kvcache.radix_tree import RadixTree


@dataclass(slots=True, eq=False)
class _Table:
    namespace: str
    root: ChunkHash
    blocks: list[int]
    committed_blocks: int
    chunk_hashes: list[ChunkHash] = field(default_factory=list)


class BlockManager:
    """KV bookkeeping of one replica. `tree` None switches prefix caching off."""

    def __init__(self, pool: BlockPool, tree: RadixTree | None, block_size: int, scheme: RouteScheme) -> None:
        self._pool = pool
        self._tree = tree
        self._block_size = block_size
        self._scheme = scheme
        self._tables: dict[str, _Table] = {}

    @property
    def capacity_tokens(self) -> int:
        return self._pool.num_blocks * self._block_size

    @property
    def num_sequences(self) -> int:
        return len(self._tables)

    def counts(self) -> BlockCounts:
        return self._pool.counts()

    def cached_prefix(self, tokens: Sequence[int], salt: str = "") -> int:
        """Tokens of the prompt that a prefill could skip right now; looks without touching the LRU order."""
        return len(self._match(tokens, salt, touch=False)) * self._block_size

    def allocate(self, seq_id: str, tokens: Sequence[int], salt: str = "") -> int | None:
        """Reserve slots for all of `tokens`, sharing what the tree holds.

        Returns the number of cached tokens (less than len(tokens): at least one token is always computed, because
        its logits are needed), or None, without side effects, when memory is short.
        """
        assert seq_id not in self._tables, f"sequence {seq_id} is already allocated"
        hits = self._match(tokens, salt, touch=True)
        for block_id in hits:
            self._pool.share(block_id)
        fresh = self._take(self._blocks_for(len(tokens)) - len(hits))
        if fresh is None:
            self._release(hits)
            return None
        root = root_hash(self._scheme.with_salt(salt))
        self._tables[seq_id] = _Table(salt, root, hits + fresh, len(hits))
        return len(hits) * self._block_size

    def append_token(self, seq_id: str, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all; False, without side effects, when no block can be had."""
        table = self._tables[seq_id]
        fresh = self._take(self._blocks_for(num_tokens) - len(table.blocks))
        if fresh is None:
            return False
        table.blocks += fresh
        return True

    def get_block_ids(self, seq_id: str) -> list[int]:
        """The block table, in position order. Callers must not change it."""
        return self._tables[seq_id].blocks

    def commit(self, seq_id: str, tokens: Sequence[int], num_computed: int) -> None:
        """KV of tokens[:num_computed] is written: whole blocks enter the tree, duplicates are folded."""
        table = self._tables[seq_id]
        full = num_computed // self._block_size
        if self._tree is None or full <= table.committed_blocks:
            return
        self._hash_chunks(table, tokens, full)
        kept = self._tree.insert(
            table.namespace, tokens[: full * self._block_size], table.blocks[:full], table.chunk_hashes
        )
        for index in range(table.committed_blocks, full):
            own, stays = table.blocks[index], kept[index]
            if own != stays:
                self._pool.share(stays)
                table.blocks[index] = stays  # the live table moves before its own copy can be reused
                self._release([own])
        table.committed_blocks = full

    def free(self, seq_id: str) -> None:
        """Let go of the sequence's blocks, tail first. Unknown ids are ignored, so freeing twice is harmless."""
        table = self._tables.pop(seq_id, None)
        if table is not None:
            self._release(table.blocks)

    def reset_cache(self) -> None:
        """Drop all cached prefixes; running sequences keep their blocks."""
        if self._tree is None:
            return
        self._tree.clear()
        for table in self._tables.values():
            table.committed_blocks = 0

    def take_events(self) -> list[CacheEvent]:
        return [] if self._tree is None else self._tree.take_events()

    def check_invariants(self) -> None:
        self._pool.check_invariants(held=(b for table in self._tables.values() for b in table.blocks))
        if self._tree is not None:
            self._tree.check_invariants()

    def _match(self, tokens: Sequence[int], salt: str, *, touch: bool) -> list[int]:
        if self._tree is None:
            return []
        return self._tree.match(salt, tokens[: len(tokens) - 1], touch=touch)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _take(self, count: int) -> list[int] | None:
        if count <= 0:
            return []
        missing = count - self._pool.num_free
        if missing > self._pool.num_evictable:
            return None
        if missing > 0 and self._tree is not None:
            self._tree.evict(missing)
        return self._pool.allocate(count)

    def _release(self, blocks: Sequence[int]) -> None:
        for block_id in reversed(blocks):
            idle = self._pool.release(block_id)
            if idle and self._tree is not None and self._pool.is_cached(block_id):
                self._tree.on_idle(block_id)

    def _hash_chunks(self, table: _Table, tokens: Sequence[int], full_blocks: int) -> None:
        size = self._scheme.chunk_tokens
        chunks = full_blocks * self._block_size // size
        for index in range(len(table.chunk_hashes), chunks):
            parent = table.chunk_hashes[-1] if table.chunk_hashes else table.root
            table.chunk_hashes.append(hash_chunk(parent, tokens[index * size : (index + 1) * size]))
