"""BlockPool: who uses which block of KV memory, as plain integers.

    free     ref 0, not cached: on the free list, content meaningless
    idle     ref 0, cached: content valid and findable; the prefix cache may evict it
    in use   ref > 0: held by that many block tables (and perhaps in the prefix cache as well)

    free list   [N] <-> 7 <-> 2 <-> 0 <-> [N]        N, N+1: heads of the rings, beside the N blocks in the same two
    idle list   [N+1] <-> 4 <-> 9 <-> [N+1]          arrays; from the left: next to be taken, longest idle

Owns: ref counts, the cached flag, the free list and the list of idle cached blocks in the order they became idle.
Does not: own tensors (kv_pool), know tokens or choose what to evict (the prefix cache).
Invariants: free + idle + in use = total; a block is on the list of its state and on no other; a refused allocation
changes nothing. All operations are O(1) per block, and there is no object per block: 13 bytes in four arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class BlockCounts(NamedTuple):
    """free + cached + in_use = total; `cached` counts the idle ones only."""

    free: int
    cached: int
    in_use: int
    total: int


class BlockPool:
    """Accounting of `num_blocks` blocks with ids 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self._num_blocks = num_blocks
        self._refs = array("i", bytes(4 * num_blocks))
        self._cached = bytearray(num_blocks)
        self._free_head, self._idle_head = num_blocks, num_blocks + 1
        self._next = array("i", [*range(1, num_blocks + 1), 0, self._idle_head])
        self._prev = array("i", [num_blocks, *range(num_blocks), self._idle_head])
        self._num_free = num_blocks
        self._num_idle = 0

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_evictable(self) -> int:
        """Idle cached blocks. All of them can be evicted, tails of chains first."""
        return self._num_idle

    def counts(self) -> BlockCounts:
        free, idle = self._num_free, self._num_idle
        return BlockCounts(free, idle, self._num_blocks - free - idle, self._num_blocks)

    def ref_count(self, block_id: int) -> int:
        return self._refs[block_id]

    def is_cached(self, block_id: int) -> bool:
        return bool(self._cached[block_id])

    def idle_blocks(self) -> Iterator[int]:
        """Idle cached blocks, longest idle first."""
        return self._ring(self._idle_head)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` free blocks with ref count 1, or None (and no change) when fewer are free."""
        if count > self._num_free:
            return None
        blocks: list[int] = []
        block_id = self._next[self._free_head]
        for _ in range(count):
            blocks.append(block_id)
            self._refs[block_id] = 1
            block_id = self._next[block_id]
        self._next[self._free_head] = block_id
        self._prev[block_id] = self._free_head
        self._num_free -= count
        return blocks

    def share(self, block_id: int) -> None:
        """One more holder. The block must be in use or cached."""
        refs = self._refs[block_id]
        if refs == 0:
            assert self._cached[block_id], f"block {block_id} is free and cannot be shared"
            self._unlink(block_id)
            self._num_idle -= 1
        self._refs[block_id] = refs + 1

    def release(self, block_id: int) -> bool:
        """One holder less. True when the last one left."""
        refs = self._refs[block_id] - 1
        assert refs >= 0, f"block {block_id} released more often than held"
        self._refs[block_id] = refs
        if refs:
            return False
        if self._cached[block_id]:
            self._link_after(self._prev[self._idle_head], block_id)
            self._num_idle += 1
        else:
            self._give_back(block_id)
        return True

    def mark_cached(self, block_id: int) -> None:
        """The prefix cache takes note of a block that is in use."""
        assert self._refs[block_id] > 0 and not self._cached[block_id], f"block {block_id} cannot enter the cache"
        self._cached[block_id] = 1

    def unmark_cached(self, block_id: int) -> None:
        """The prefix cache lets go. An idle block becomes free, one in use stays with its holders."""
        assert self._cached[block_id], f"block {block_id} is not in the cache"
        self._cached[block_id] = 0
        if self._refs[block_id] == 0:
            self._unlink(block_id)
            self._num_idle -= 1
            self._give_back(block_id)

    def check_invariants(self, held: Iterable[int]) -> None:
        """`held`: every reference of every block table, with repetition. AssertionError names the difference."""
        expected = array("i", bytes(4 * self._num_blocks))
        for block_id in held:
            expected[block_id] += 1
        wrong = [b for b in range(self._num_blocks) if expected[b] != self._refs[b]]
        assert not wrong, f"ref counts differ from held references: {wrong[:5]}"
        for name, head, count, cached in (
            ("free", self._free_head, self._num_free, False),
            ("idle", self._idle_head, self._num_idle, True),
        ):
            listed = list(self._ring(head))
            should = {b for b in range(self._num_blocks) if self._refs[b] == 0 and bool(self._cached[b]) is cached}
            assert len(listed) == len(set(listed)) == count, f"{name} list of {len(listed)} blocks, counted {count}"
            assert set(listed) == should, f"{name} list is wrong at {sorted(set(listed) ^ should)[:5]}"

    def _give_back(self, block_id: int) -> None:
        """To the front: no free block is worth more than another, and the last one freed is still in CPU caches."""
        self._link_after(self._free_head, block_id)
        self._num_free += 1

    def _link_after(self, place: int, block_id: int) -> None:
        after = self._next[place]
        self._next[place] = self._prev[after] = block_id
        self._prev[block_id], self._next[block_id] = place, after

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before], self._prev[after] = after, before

    def _ring(self, head: int) -> Iterator[int]:
        """The list behind `head`, checked to be sound both ways."""
        last, block_id = head, self._next[head]
        while block_id != head:
            assert self._prev[block_id] == last, f"broken list between {last} and {block_id}"
            yield block_id
            last, block_id = block_id, self._next[block_id]
