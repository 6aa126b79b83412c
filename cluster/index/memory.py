"""MemoryIndex: the in-process index, inverted: chunk -> bitmask of the slots that hold it.

    masks   chunk key (first 8 bytes) ->  0b101       slot 0: (worker a, epoch 7)   keys {..}   live
                                            | |       slot 1: free
                                            | +-----  slot 2: (worker b, epoch 9)   keys {..}   retired: being swept
                                            +-------

Purging a life only clears its bit in the mask of live slots, so it costs nothing however much the life held; its
records are freed in slices, and its slot is reused after the last one. Masks and key sets are cut into shards,
because growing one large table is a single step of the interpreter, of many milliseconds.

Owns: the masks, the slots and the sweeping.
Does not: talk to Redis, check sequence numbers, or order anything: any subset of chunks is a legal state.
Invariants: a bit is set in a chunk's mask exactly while the slot's key set holds the chunk; no empty masks stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, WorkerId

_KEY_BYTES = 8
_SWEEP_SLICE = 256
_SHARDS = 64  # a key's shard is its lowest bits
_SHARD_MASK = _SHARDS - 1


@dataclass(slots=True, eq=False)
class _Slot:
    number: int
    worker_id: WorkerId
    epoch: Epoch
    keys: list[set[int]] = field(default_factory=lambda: [set() for _ in range(_SHARDS)])

    def num_keys(self) -> int:
        return sum(map(len, self.keys))


def _key(chunk: ChunkHash) -> int:
    return int.from_bytes(chunk[:_KEY_BYTES], "little")


class MemoryIndex:
    """The `ChunkIndex` of a router and of the tests."""

    def __init__(self) -> None:
        self._masks: tuple[dict[int, int], ...] = tuple({} for _ in range(_SHARDS))
        self._live: dict[WorkerId, _Slot] = {}
        self._by_number: dict[int, _Slot] = {}  # live slots only
        self._live_mask = 0
        self._retired: deque[_Slot] = deque()
        self._free_numbers: list[int] = []
        self._num_slots = 0

    def add_worker(self, worker_id: WorkerId, epoch: Epoch) -> None:
        slot = self._live.get(worker_id)
        if slot is not None:
            if epoch <= slot.epoch:
                return
            self._retire(slot)
        self._open_slot(worker_id, epoch)
        self.sweep(_SWEEP_SLICE)

    def drop_worker(self, worker_id: WorkerId) -> None:
        slot = self._live.get(worker_id)
        if slot is not None:
            self._retire(slot)

    def apply(self, worker_id: WorkerId, epoch: Epoch, events: Sequence[CacheEvent]) -> None:
        slot = self._live.get(worker_id)
        if slot is None or slot.epoch != epoch:
            return
        for event in events:
            if event.kind is CacheEventKind.STORED:
                self._store(slot, event.chunk_hashes)
            elif event.kind is CacheEventKind.REMOVED:
                self._remove(slot, event.chunk_hashes)
            elif slot.num_keys():
                self._retire(slot)
                slot = self._open_slot(worker_id, epoch)
        if self._retired:
            self.sweep(_SWEEP_SLICE)

    def overlaps(self, chunk_hashes: Sequence[ChunkHash]) -> dict[WorkerId, int]:
        found: dict[WorkerId, int] = {}
        holders = self._live_mask
        masks = self._masks
        for depth, chunk in enumerate(chunk_hashes):
            key = _key(chunk)
            remaining = holders & masks[key & _SHARD_MASK].get(key, 0)
            if remaining != holders:
                if depth:
                    self._credit(holders ^ remaining, depth, found)
                if not remaining:
                    return found
                holders = remaining
        if chunk_hashes:
            self._credit(holders, len(chunk_hashes), found)
        return found

    def sweep(self, limit: int) -> bool:
        while self._retired and limit > 0:
            slot = self._retired[0]
            bit = 1 << slot.number
            while slot.keys and limit > 0:
                if slot.keys[-1]:
                    self._clear_bit(slot.keys[-1].pop(), bit)
                    limit -= 1
                else:
                    slot.keys.pop()
            if not slot.keys:
                self._retired.popleft()
                self._free_numbers.append(slot.number)
        return bool(self._retired)

    def chunk_count(self, worker_id: WorkerId) -> int:
        """Chunks that the live life of the worker holds; 0 for an unknown worker."""
        slot = self._live.get(worker_id)
        return 0 if slot is None else slot.num_keys()

    def live(self) -> dict[WorkerId, Epoch]:
        return {worker_id: slot.epoch for worker_id, slot in self._live.items()}

    def total_records(self) -> int:
        """Distinct chunks in memory, those of lives not yet swept included."""
        return sum(map(len, self._masks))

    def check_invariants(self) -> None:
        """Compare masks and key sets in full. For tests: it costs as much as the index is large."""
        rebuilt: dict[int, int] = {}
        slots = [*self._live.values(), *self._retired]
        for slot in slots:
            for key in chain.from_iterable(slot.keys):
                rebuilt[key] = rebuilt.get(key, 0) | 1 << slot.number
        masks = {key: mask for shard in self._masks for key, mask in shard.items()}
        assert rebuilt == masks, f"masks of {len(masks)} chunks, key sets of {len(rebuilt)}"
        numbers = [slot.number for slot in slots] + self._free_numbers
        assert sorted(numbers) == list(range(self._num_slots)), f"slot numbers {numbers} of {self._num_slots}"
        assert self._live_mask == sum(1 << slot.number for slot in self._live.values())
        assert self._by_number == {slot.number: slot for slot in self._live.values()}

    def _open_slot(self, worker_id: WorkerId, epoch: Epoch) -> _Slot:
        if self._free_numbers:
            number = self._free_numbers.pop()
        else:
            number = self._num_slots
            self._num_slots += 1
        slot = _Slot(number, worker_id, epoch)
        self._live[worker_id] = self._by_number[number] = slot
        self._live_mask |= 1 << number
        return slot

    def _retire(self, slot: _Slot) -> None:
        del self._live[slot.worker_id], self._by_number[slot.number]
        self._live_mask ^= 1 << slot.number
        self._retired.append(slot)

    def _store(self, slot: _Slot, chunks: Sequence[ChunkHash]) -> None:
        bit = 1 << slot.number
        for chunk in chunks:
            key = _key(chunk)
            shard = key & _SHARD_MASK
            masks = self._masks[shard]
            slot.keys[shard].add(key)
            masks[key] = masks.get(key, 0) | bit

    def _remove(self, slot: _Slot, chunks: Sequence[ChunkHash]) -> None:
        bit = 1 << slot.number
        for chunk in chunks:
            key = _key(chunk)
            keys = slot.keys[key & _SHARD_MASK]
            if key in keys:
                keys.remove(key)
                self._clear_bit(key, bit)

    def _clear_bit(self, key: int, bit: int) -> None:
        masks = self._masks[key & _SHARD_MASK]
        left = masks[key] ^ bit
        if left:
            masks[key] = left
        else:
            del masks[key]

    def _credit(self, holders: int, depth: int, found: dict[WorkerId, int]) -> None:
        while holders:
            lowest = holders & -holders
            found[self._by_number[lowest.bit_length() - 1].worker_id] = depth
            holders ^= lowest
