"""MemoryIndex: the in-process index, inverted: a chunk knows the slots that hold it.

    slot 0   worker a, epoch 7    live        chunk ->  0b101  (cluster.index.chunk_table)
    slot 1   free
    slot 2   worker b, epoch 9    retired: its bits are being swept

Purging a life only takes its bit out of the mask of live slots, so it costs nothing however much the life held; its
records are freed in slices, and then its slot is reused.

A chunk hash names all before it and replicas evict leaves only, so a chunk that is held proves its whole prefix. That
makes a lookup a search over depth. It also makes half-loaded snapshots harmless, in whatever order they come and even
if they were read while the worker went on: a depth is credited only up to a chunk that the worker reported and was
not yet seen to lose, so a hole can make the index credit too little, and never more than the worker had.

Owns: the lives and their slots.
Does not: talk to Redis, check sequence numbers, or order anything.
Invariants: a slot's count is the number of masks with its bit; a number is free, live or retired, and exactly one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, WorkerId
from cluster.index.chunk_table import ChunkTable

_SWEEP_SLICE = 256
_FEW = 4  # so many bits are faster found one by one
_NOBODY = WorkerId("")
_DIGIT_VALUES = bytes.maketrans(b"01", b"\x00\x01")


@dataclass(slots=True, eq=False)
class _Slot:
    number: int
    bit: int
    worker_id: WorkerId
    epoch: Epoch
    num_chunks: int = 0


class MemoryIndex:
    """The `ChunkIndex` of a router and of the tests."""

    def __init__(self) -> None:
        self._table = ChunkTable()
        self._live: dict[WorkerId, _Slot] = {}
        self._live_mask = 0
        self._worker_ids: list[WorkerId] = []  # by slot number
        self._retired: dict[int, _Slot] = {}  # by number
        self._free_numbers: list[int] = []  # a heap: low numbers make short masks

    def add_worker(self, worker_id: WorkerId, epoch: Epoch) -> None:
        slot = self._live.get(worker_id)
        if slot is not None:
            if epoch <= slot.epoch:
                return
            self._retire(slot)
        self._open_slot(worker_id, epoch)

    def drop_worker(self, worker_id: WorkerId) -> None:
        slot = self._live.get(worker_id)
        if slot is not None:
            self._retire(slot)

    def apply(self, worker_id: WorkerId, epoch: Epoch, events: Sequence[CacheEvent]) -> None:
        slot = self._live.get(worker_id)
        if slot is None or slot.epoch != epoch:
            return
        table = self._table
        for event in events:
            if event.kind is CacheEventKind.STORED:
                slot.num_chunks += table.add(event.chunk_hashes, slot.bit)
            elif event.kind is CacheEventKind.REMOVED:
                slot.num_chunks -= table.remove(event.chunk_hashes, slot.bit)
            elif slot.num_chunks:
                self._retire(slot)
                slot = self._open_slot(worker_id, epoch)
        if self._retired:
            self.sweep(_SWEEP_SLICE)

    def overlaps(self, chunk_hashes: Sequence[ChunkHash]) -> dict[WorkerId, int]:
        found: dict[WorkerId, int] = {}
        for depth, holders in self._table.leading_runs(chunk_hashes, self._live_mask):
            if holders.bit_count() > _FEW:
                found.update(dict.fromkeys(self._workers_of(holders), depth))
                continue
            while holders:
                lowest = holders & -holders
                found[self._worker_ids[lowest.bit_length() - 1]] = depth
                holders ^= lowest
        return found

    def sweep(self, limit: int) -> bool:
        gone = self._table.sweep(limit)
        if gone:
            for slot in [slot for slot in self._retired.values() if slot.bit & gone]:
                self._free(self._retired.pop(slot.number))
        return bool(self._retired)

    def chunk_count(self, worker_id: WorkerId) -> int:
        """Chunks that the live life of the worker holds; 0 for an unknown worker."""
        slot = self._live.get(worker_id)
        return 0 if slot is None else slot.num_chunks

    def live(self) -> dict[WorkerId, Epoch]:
        return {worker_id: slot.epoch for worker_id, slot in self._live.items()}

    def total_records(self) -> int:
        """Distinct chunks in memory, those of lives not yet swept included."""
        return len(self._table)

    def slot_count(self) -> int:
        """Slots ever needed at once: the length of the longest mask."""
        return len(self._worker_ids)

    def table_bytes(self) -> int:
        """Memory of the tables, without their keys and masks."""
        return sum(self._table.table_bytes())

    def check_invariants(self) -> None:
        """Recount everything. For tests: it costs as much as the index is large."""
        counts = dict.fromkeys(range(len(self._worker_ids)), 0)
        for key, mask in self._table.items():
            assert mask > 0, f"chunk {key} has no holder"
            for number in range(mask.bit_length()):
                counts[number] += mask >> number & 1
        slots = {slot.number: slot for slot in self._live.values()}
        assert self._live_mask == sum(slot.bit for slot in slots.values())
        for number, slot in slots.items():
            assert slot.num_chunks == counts[number], f"slot {number}: {slot.num_chunks} of {counts[number]}"
            assert self._worker_ids[number] == slot.worker_id
        assert not any(counts[number] for number in self._free_numbers), "a free slot holds chunks"
        assert sorted([*slots, *self._retired, *self._free_numbers]) == list(counts)

    def _open_slot(self, worker_id: WorkerId, epoch: Epoch) -> _Slot:
        if self._free_numbers:
            number = heapq.heappop(self._free_numbers)
        else:
            number = len(self._worker_ids)
            self._worker_ids.append(_NOBODY)
        slot = _Slot(number, 1 << number, worker_id, epoch)
        self._worker_ids[number] = worker_id
        self._live[worker_id] = slot
        self._live_mask |= slot.bit
        return slot

    def _retire(self, slot: _Slot) -> None:
        del self._live[slot.worker_id]
        self._live_mask ^= slot.bit
        if slot.num_chunks:
            self._table.retire(slot.bit)
            self._retired[slot.number] = slot
        else:
            self._free(slot)

    def _free(self, slot: _Slot) -> None:
        self._worker_ids[slot.number] = _NOBODY
        heapq.heappush(self._free_numbers, slot.number)

    def _workers_of(self, holders: int) -> Iterable[WorkerId]:
        """The workers of the set bits, without a step of the interpreter for each."""
        return compress(self._worker_ids, f"{holders:b}"[::-1].encode().translate(_DIGIT_VALUES))
