"""BlockPool: who uses which block of KV memory, as plain integers.

    free     ref 0, not cached: on the free stack, content meaningless
    cached   ref 0, in the prefix tree: content valid, may be evicted by the tree
    in use   ref > 0: held by that many block tables (and perhaps in the tree as well)

Owns: ref counts, the cached flag, the free stack.
Does not: own tensors (kv_pool), know tokens or choose what to evict (radix_tree).
Invariants: free + cached + in use = total; a block is on the free stack exactly when it is free; a refused
allocation changes nothing. All operations are O(1) per block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple


class BlockCounts(NamedTuple):
    free: int
    cached: int
    in_use: int
    total: int


class BlockPool:
    """Accounting of `num_blocks` blocks with ids 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self._refs = array("i", bytes(4 * num_blocks))
        self._cached = bytearray(num_blocks)
        # A stack, not a queue: eviction order is the tree's business, so no free block is worth more than another,
        # and the one freed last is still warm in the CPU's caches.
        self._free = array("i", range(num_blocks - 1, -1, -1))
        self._num_idle_cached = 0

    @property
    def num_blocks(self) -> int:
        return len(self._refs)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        """Cached blocks that nobody references. All of them can be evicted, leaves first."""
        return self._num_idle_cached

    def counts(self) -> BlockCounts:
        free, cached = self.num_free, self._num_idle_cached
        return BlockCounts(free, cached, self.num_blocks - free - cached, self.num_blocks)

    def ref_count(self, block_id: int) -> int:
        return self._refs[block_id]

    def is_cached(self, block_id: int) -> bool:
        return bool(self._cached[block_id])

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` free blocks with ref count 1, or None (and no change) when fewer are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block_id in blocks:
            self._refs[block_id] = 1
        return blocks

    def share(self, block_id: int) -> None:
        """One more holder. The block must be in use or cached."""
        refs = self._refs[block_id]
        if refs == 0:
            assert self._cached[block_id], f"block {block_id} is free and cannot be shared"
            self._num_idle_cached -= 1
        self._refs[block_id] = refs + 1

    def release(self, block_id: int) -> bool:
        """One holder less. True when the last one left."""
        refs = self._refs[block_id] - 1
        assert refs >= 0, f"block {block_id} released more often than held"
        self._refs[block_id] = refs
        if refs:
            return False
        if self._cached[block_id]:
            self._num_idle_cached += 1
        else:
            self._free.append(block_id)
        return True

    def mark_cached(self, block_id: int) -> None:
        """The tree takes note of a block that is in use."""
        assert self._refs[block_id] > 0 and not self._cached[block_id], f"block {block_id} cannot enter the tree"
        self._cached[block_id] = 1

    def unmark_cached(self, block_id: int) -> None:
        """The tree lets go. An idle block becomes free, one in use stays with its holders."""
        assert self._cached[block_id], f"block {block_id} is not in the tree"
        self._cached[block_id] = 0
        if self._refs[block_id] == 0:
            self._num_idle_cached -= 1
            self._free.append(block_id)

    def check_invariants(self, held: Iterable[int]) -> None:
        """`held`: every reference of every block table, with repetition. AssertionError names the difference."""
        expected = array("i", bytes(4 * self.num_blocks))
        for block_id in held:
            expected[block_id] += 1
        wrong = [b for b in range(self.num_blocks) if expected[b] != self._refs[b]]
        assert not wrong, f"ref counts differ from held references: {wrong[:5]}"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is on the free stack twice"
        should = {b for b in range(self.num_blocks) if self._refs[b] == 0 and not self._cached[b]}
        assert free == should, f"free stack differs from free blocks: {sorted(free ^ should)[:5]}"
        idle = sum(1 for b in range(self.num_blocks) if self._refs[b] == 0 and self._cached[b])
        assert idle == self._num_idle_cached, f"{idle} idle cached blocks, counted {self._num_idle_cached}"
