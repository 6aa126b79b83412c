"""ChunkTable: which slots hold a chunk, as one bitmask per chunk.

    shards[17]   chunk key (60 bits of the hash) ->  0b101       bit 0: slot 0 holds it, bit 2: slot 2
    shards[18]   ...

Nothing is kept per (chunk, slot) but a bit. Equal masks are mostly one object, so a chunk costs its key and its place
in a dict however many slots hold it. The price is that freeing what a slot held means looking at every record; that
is done shard by shard. A chunk's shard is the top bits of its key, because a dict places keys by the low ones.

A dict that lost its items keeps its memory. So an empty shard is replaced at once, one that became sparse is copied,
and sweeping builds a shard anew; these are small pieces of work, as is a shard's own growing.

Owns: keys, masks, the search for leading runs, and giving memory back.
Does not: know workers, epochs, or which slots are live.
Invariants: no empty masks stay; a table over `_SPARSE_BYTES` per record is copied before four more are removed from it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence

from cluster.core.hashing import ChunkHash

_KEY_BYTES = 8
_DROPPED_BITS = 4  # an int of 60 bits takes 32 bytes, one of 64 takes 48
_SHARD_BITS = 13
_SHARDS = 1 << _SHARD_BITS
_SHARD_SHIFT = 8 * _KEY_BYTES - _DROPPED_BITS - _SHARD_BITS
_SPARSE_BYTES = 120  # a dict takes 30 to 60 bytes per item while it grows
_SHRINK_CHECK = 4 - 1
_MAX_SHARED_MASKS = 4096


def _key(chunk: ChunkHash) -> int:
    return int.from_bytes(chunk[:_KEY_BYTES], sys.byteorder) >> _DROPPED_BITS


def _keys(chunks: Sequence[ChunkHash]) -> list[int]:
    return [word >> _DROPPED_BITS for word in array("Q", b"".join(chunks))[::2]]


class ChunkTable:
    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        self._shared_masks: dict[int, int] = {}
        self._waiting = 0  # bits to be cleared in the pass after this one
        self._clearing = 0  # bits that this pass clears
        self._next_shard = 0  # where this pass goes on

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def add(self, chunks: Sequence[ChunkHash], bit: int) -> int:
        """Set `bit` for the chunks. Returns for how many it was not set before."""
        shards, added = self._shards, 0
        before: int | None = None
        after = 0  # the chunks of a prompt mostly have one and the same mask: `before` becomes `after`
        for key in _keys(chunks):
            shard = shards[key >> _SHARD_SHIFT]
            mask = shard.get(key)
            if mask is None:
                shard[key] = bit
            elif mask is before:
                shard[key] = after
            elif mask & bit:
                continue
            else:
                before, after = mask, self._shared(mask | bit)
                shard[key] = after
            added += 1
        return added

    def remove(self, chunks: Sequence[ChunkHash], bit: int) -> int:
        """Clear `bit` for the chunks. Returns for how many it was set before."""
        shards, removed = self._shards, 0
        before: int | None = None
        after = 0
        for key in _keys(chunks):
            number = key >> _SHARD_SHIFT
            shard = shards[number]
            mask = shard.get(key, 0)
            if mask is before:
                shard[key] = after
            elif mask == bit:
                del shard[key]
                if not len(shard) & _SHRINK_CHECK:
                    self._shrink(number)
            elif mask & bit:
                before, after = mask, self._shared(mask ^ bit)
                shard[key] = after
            else:
                continue
            removed += 1
        return removed

    def leading_runs(self, chunks: Sequence[ChunkHash], holders: int) -> list[tuple[int, int]]:
        """(depth, slots) of those among `holders` that hold at least one leading chunk; every slot once.

        What a slot holds is closed under prefix, so depth is found by halving, for all slots at once: who holds the
        middle chunk is looked for above it, who does not, below. Whatever a slot holds, it does hold the chunk at
        `depth - 1` and the first, and does not hold the one at `depth`.
        """
        if not chunks:
            return []
        shards, runs = self._shards, []
        key = _key(chunks[0])
        holders &= shards[key >> _SHARD_SHIFT].get(key, 0)
        todo = [(0, len(chunks), holders)] if holders else []
        while todo:
            low, high, holders = todo.pop()  # all of them hold the chunk at `low`, none the one at `high`
            while high - low > 1:
                middle = (low + high) // 2
                key = int.from_bytes(chunks[middle][:_KEY_BYTES], sys.byteorder) >> _DROPPED_BITS
                deeper = holders & shards[key >> _SHARD_SHIFT].get(key, 0)
                if deeper == holders:
                    low = middle
                elif not deeper:
                    high = middle
                else:
                    todo.append((low, middle, holders ^ deeper))
                    low, holders = middle, deeper
            runs.append((low + 1, holders))
        return runs

    def retire(self, bit: int) -> None:
        """Have sweep clear `bit` everywhere. It must not be added again before sweep has returned it."""
        self._waiting |= bit

    def sweep(self, limit: int) -> int:
        """Look at `limit` records, or at one shard if that has more. Returns the bits now cleared everywhere.

        One pass over the table clears all bits that were retired before it began.
        """
        gone, looked_at = 0, 0
        while self._clearing or self._waiting:
            if not self._clearing:
                self._clearing, self._waiting, self._next_shard = self._waiting, 0, 0
            cost = 1 + len(self._shards[self._next_shard])
            if looked_at and looked_at + cost > limit:
                break
            looked_at += cost
            self._clear(self._next_shard)
            self._next_shard += 1
            if self._next_shard == _SHARDS:
                gone |= self._clearing
                self._clearing = 0
                self._shared_masks.clear()  # some were of the lives that are gone, and each may pin a page
        return gone

    def items(self) -> Iterator[tuple[int, int]]:
        for shard in self._shards:
            yield from shard.items()

    def table_bytes(self) -> list[int]:
        """Memory of each shard's dict, without its keys and masks."""
        return [sys.getsizeof(shard) for shard in self._shards]

    def _clear(self, number: int) -> None:
        shard, bits = self._shards[number], self._clearing
        left_of = {mask: self._shared(mask & ~bits) for mask in set(shard.values()) if mask & bits}
        if left_of:
            self._shards[number] = {key: left for key, mask in shard.items() if (left := left_of.get(mask, mask))}

    def _shrink(self, number: int) -> None:
        shard = self._shards[number]
        if not shard:
            self._shards[number] = {}
        elif sys.getsizeof(shard) > _SPARSE_BYTES * len(shard):
            self._shards[number] = dict(shard)

    def _shared(self, mask: int) -> int:
        """An equal mask that others use too."""
        if len(self._shared_masks) >= _MAX_SHARED_MASKS:
            self._shared_masks.clear()
        return self._shared_masks.setdefault(mask, mask)
