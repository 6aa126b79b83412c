"""InstrumentedIndex: the same answers, counted; and an observer that hears of every loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, WorkerId
from cluster.index.instrumented import InstrumentedIndex
from cluster.index.memory import MemoryIndex

A, B = WorkerId("a"), WorkerId("b")
E1, E2 = Epoch(1), Epoch(2)
PROMPT = tuple(ChunkHash(bytes([number]) * 16) for number in range(6))
STORED, REMOVED, CLEARED = CacheEventKind.STORED, CacheEventKind.REMOVED, CacheEventKind.CLEARED


@dataclass
class Losses:
    heard: list[tuple[WorkerId, tuple[ChunkHash, ...] | None]] = field(default_factory=list)

    def lost(self, worker_id: WorkerId, chunk_hashes: Sequence[ChunkHash] | None) -> None:
        self.heard.append((worker_id, None if chunk_hashes is None else tuple(chunk_hashes)))


@pytest.fixture
def losses() -> Losses:
    return Losses()


@pytest.fixture
def index(losses: Losses) -> InstrumentedIndex:
    ticks = iter([0.0, 0.25, 10.0, 11.0, 20.0, 20.5])
    return InstrumentedIndex(MemoryIndex(), 64, observer=losses, timer=lambda: next(ticks))


def test_lookups_their_time_and_hits_in_tokens(index: InstrumentedIndex) -> None:
    index.add_worker(A, E1)
    index.add_worker(B, E1)
    index.apply(A, E1, [CacheEvent(STORED, PROMPT[:4])])
    index.apply(B, E1, [CacheEvent(STORED, PROMPT[:2])])
    assert index.overlaps(PROMPT) == {A: 4, B: 2}
    assert index.overlaps(PROMPT[5:]) == {}
    assert index.overlaps(PROMPT[:1]) == {A: 1, B: 1}
    metrics = index.snapshot()
    assert metrics["kvray_index_lookups"] == 3
    assert metrics["kvray_index_lookup_seconds"] == 0.25 + 1.0 + 0.5
    assert metrics["kvray_index_longest_lookup_seconds"] == 1.0
    assert metrics["kvray_index_query_tokens"] == (6 + 1 + 1) * 64
    assert metrics["kvray_index_hit_tokens"] == (4 + 0 + 1) * 64  # of the best worker


def test_events_their_chunks_and_the_records_they_leave(index: InstrumentedIndex) -> None:
    index.add_worker(A, E1)
    index.apply(A, E1, [CacheEvent(STORED, PROMPT), CacheEvent(REMOVED, PROMPT[4:])])
    index.apply(A, E1, [CacheEvent(STORED, PROMPT[4:5])])
    metrics = index.snapshot()
    assert (metrics["kvray_index_events"], metrics["kvray_index_records"]) == (3, 5)
    assert (metrics["kvray_index_events_stored"], metrics["kvray_index_chunks_stored"]) == (2, 7)
    assert (metrics["kvray_index_events_removed"], metrics["kvray_index_chunks_removed"]) == (1, 2)
    assert (index.chunk_count(A), index.chunk_count(B), index.total_records()) == (5, 0, 5)
    index.drop_worker(A)
    while index.sweep(100):
        pass
    assert index.snapshot()["kvray_index_records"] == 0
    assert all(name.startswith("kvray_index_") for name in metrics)


def test_every_way_to_lose_chunks_is_told(index: InstrumentedIndex, losses: Losses) -> None:
    index.add_worker(A, E1)
    losses.heard.clear()
    index.apply(A, E1, [CacheEvent(STORED, PROMPT), CacheEvent(REMOVED, PROMPT[3:]), CacheEvent(CLEARED)])
    assert losses.heard == [(A, PROMPT[3:]), (A, None)]
    index.add_worker(A, E2)
    index.drop_worker(A)
    assert losses.heard[2:] == [(A, None), (A, None)]


def test_it_works_without_an_observer() -> None:
    index = InstrumentedIndex(MemoryIndex(), 64)
    index.add_worker(A, E1)
    index.apply(A, E1, [CacheEvent(STORED, PROMPT), CacheEvent(CLEARED)])
    assert index.overlaps(PROMPT) == {}
    assert index.snapshot()["kvray_index_lookup_seconds"] > 0


STORED_MARK = ChunkHash(b"stored")


class Changes(Losses):
    def stored(self, worker_id: WorkerId, chunk_hashes: Sequence[ChunkHash]) -> None:
        self.heard.append((worker_id, (STORED_MARK, *chunk_hashes)))


def test_the_one_who_explains_reuse_hears_gains_and_losses(losses: Losses) -> None:
    changes = Changes()
    index = InstrumentedIndex(MemoryIndex(), 64, observer=losses, reuse=changes)
    index.add_worker(A, E1)
    index.apply(A, E1, [CacheEvent(STORED, PROMPT[:2]), CacheEvent(REMOVED, PROMPT[1:2])])
    assert changes.heard == [(A, None), (A, (STORED_MARK, *PROMPT[:2])), (A, PROMPT[1:2])]
    assert losses.heard == [(A, None), (A, PROMPT[1:2])]
