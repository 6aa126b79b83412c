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

_AUDIT_PIECE = 1024  # blocks; a few tenths of a millisecond


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
        self._evicted: list[int] | None = None

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

    def share(self, block_ids: Iterable[int]) -> None:
        """One more holder of each. They must be in use or cached."""
        for block_id in block_ids:
            refs = self._refs[block_id]
            if refs == 0:
                assert self._cached[block_id], f"block {block_id} is free and cannot be shared"
                self._unlink(block_id)
                self._num_idle -= 1
            self._refs[block_id] = refs + 1

    def release(self, block_ids: Iterable[int]) -> list[int]:
        """One holder less of each. Returns those whose last one left and that are cached: they are idle now."""
        all_refs, idle = self._refs, []
        for block_id in block_ids:
            refs = all_refs[block_id] - 1
            assert refs >= 0, f"block {block_id} released more often than held"
            all_refs[block_id] = refs
            if refs:
                continue
            if self._cached[block_id]:
                self._link_after(self._prev[self._idle_head], block_id)
                idle.append(block_id)
            else:
                self._give_back(block_id)
        self._num_idle += len(idle)
        return idle

    def mark_cached(self, block_ids: Iterable[int]) -> None:
        """The prefix cache takes note of blocks that are in use."""
        refs, cached = self._refs, self._cached
        for block_id in block_ids:
            assert refs[block_id] > 0 and not cached[block_id], f"block {block_id} cannot enter the cache"
            cached[block_id] = 1

    def unmark_cached(self, block_ids: Iterable[int]) -> None:
        """The prefix cache lets go. Idle blocks become free, those in use stay with their holders."""
        for block_id in block_ids:
            assert self._cached[block_id], f"block {block_id} is not in the cache"
            self._cached[block_id] = 0
            if self._refs[block_id] == 0:
                self._unlink(block_id)
                self._num_idle -= 1
                self._give_back(block_id)
                if self._evicted is not None:
                    self._evicted.append(block_id)

    def watch_evictions(self) -> None:
        """From now on remember which idle blocks the prefix cache frees, for `take_evicted`."""
        self._evicted = []

    def take_evicted(self) -> list[int]:
        """The idle blocks freed since the last call, in order."""
        assert self._evicted is not None, "nobody watches the evictions"
        evicted, self._evicted = self._evicted, []
        return evicted

    def check_invariants(self, held: Iterable[int]) -> None:
        """`held`: every reference of every block table, with repetition. AssertionError names the difference."""
        for _ in self.audit(held):
            pass

    def audit(self, held: Iterable[int]) -> Iterator[None]:
        """`check_invariants` in short pieces (one, for a small pool). Nothing may change until it ends."""
        expected = array("i", bytes(4 * self._num_blocks))
        for number, block_id in enumerate(held, start=1):
            expected[block_id] += 1
            if number % _AUDIT_PIECE == 0:
                yield
        free = idle = 0
        for start in range(0, self._num_blocks, _AUDIT_PIECE):
            if start:
                yield
            piece = range(start, min(start + _AUDIT_PIECE, self._num_blocks))
            wrong = [(b, self._refs[b], expected[b]) for b in piece if expected[b] != self._refs[b]]
            assert not wrong, f"ref counts differ from held references: (block, count, held) {wrong[:5]}"
            unused = [self._cached[b] for b in piece if self._refs[b] == 0]
            idle += sum(unused)
            free += len(unused) - sum(unused)
        yield from self._audit_list("free", self._free_head, (self._num_free, free), cached=0)
        yield from self._audit_list("idle", self._idle_head, (self._num_idle, idle), cached=1)

    def _audit_list(self, name: str, head: int, counts: tuple[int, int], *, cached: int) -> Iterator[None]:
        """A sound ring has no block twice, so right states and the right length make it the right list."""
        length = 0
        for length, block_id in enumerate(self._ring(head), start=1):
            state = self._refs[block_id], self._cached[block_id]
            assert state == (0, cached), f"{name} list is wrong at block {block_id}: (refs, cached) {state}"
            if length % _AUDIT_PIECE == 0:
                yield
        assert counts == (length, length), f"{name} list has {length} blocks, (counter, state) say {counts}"

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
