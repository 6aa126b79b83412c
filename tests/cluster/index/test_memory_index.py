"""MemoryIndex against a naive oracle, and its promise to free what it no longer needs."""

from __future__ import annotations

import time
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, WorkerId
from cluster.index.memory import MemoryIndex

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
E1, E2 = Epoch(1), Epoch(2)
Chain = Callable[..., list[ChunkHash]]


def stored(*chunks: ChunkHash) -> CacheEvent:
    return CacheEvent(CacheEventKind.STORED, chunks)


def removed(*chunks: ChunkHash) -> CacheEvent:
    return CacheEvent(CacheEventKind.REMOVED, chunks)


CLEARED = CacheEvent(CacheEventKind.CLEARED)


class SetsOracle:
    """What MemoryIndex must answer, in the most obvious form."""

    def __init__(self) -> None:
        self.lives: dict[WorkerId, tuple[Epoch, set[ChunkHash]]] = {}

    def add_worker(self, worker_id: WorkerId, epoch: Epoch) -> None:
        if worker_id not in self.lives or self.lives[worker_id][0] < epoch:
            self.lives[worker_id] = (epoch, set())

    def drop_worker(self, worker_id: WorkerId) -> None:
        self.lives.pop(worker_id, None)

    def apply(self, worker_id: WorkerId, epoch: Epoch, events: list[CacheEvent]) -> None:
        if worker_id not in self.lives or self.lives[worker_id][0] != epoch:
            return
        held = self.lives[worker_id][1]
        for event in events:
            if event.kind is CacheEventKind.STORED:
                held.update(event.chunk_hashes)
            elif event.kind is CacheEventKind.REMOVED:
                held.difference_update(event.chunk_hashes)
            else:
                held.clear()

    def overlaps(self, prompt: list[ChunkHash]) -> dict[WorkerId, int]:
        found = {}
        for worker_id, (_, held) in self.lives.items():
            depth = 0
            while depth < len(prompt) and prompt[depth] in held:
                depth += 1
            if depth:
                found[worker_id] = depth
        return found


_CHUNKS = [ChunkHash(bytes([number]) * 16) for number in range(6)]
_workers = st.sampled_from([A, B, C])
_epochs = st.sampled_from([E1, E2, Epoch(3)])
_events = st.builds(
    CacheEvent,
    st.sampled_from([CacheEventKind.STORED, CacheEventKind.STORED, CacheEventKind.REMOVED]),
    st.lists(st.sampled_from(_CHUNKS), max_size=6).map(tuple),
) | st.just(CLEARED)
_operations = st.one_of(
    st.tuples(st.just("add"), _workers, _epochs),
    st.tuples(st.just("drop"), _workers),
    st.tuples(st.just("apply"), _workers, _epochs, st.lists(_events, min_size=1, max_size=4)),
    st.tuples(st.just("sweep"), st.integers(0, 4)),
)


@settings(max_examples=3 * settings().max_examples // 2)
@given(operations=st.lists(_operations, max_size=25), prompt=st.lists(st.sampled_from(_CHUNKS), max_size=6))
def test_answers_like_a_dict_of_sets(operations: list[tuple], prompt: list[ChunkHash]) -> None:  # type: ignore[type-arg]
    index, oracle = MemoryIndex(), SetsOracle()
    for worker_id in (A, B):
        index.add_worker(worker_id, E1)
        oracle.add_worker(worker_id, E1)
    for name, *arguments in operations:
        if name == "sweep":
            index.sweep(*arguments)
        else:
            method = {"add": "add_worker", "drop": "drop_worker", "apply": "apply"}[name]
            getattr(index, method)(*arguments)
            getattr(oracle, method)(*arguments)
        index.check_invariants()
        for asked in (prompt, _CHUNKS):
            assert index.overlaps(asked) == oracle.overlaps(asked)
        assert index.live() == {worker_id: life[0] for worker_id, life in oracle.lives.items()}
        for worker_id in (A, B, C):
            assert index.chunk_count(worker_id) == len(oracle.lives.get(worker_id, (0, ()))[1])


def test_overlap_is_the_leading_run_of_each_worker(chain: Chain) -> None:
    index, prompt = MemoryIndex(), chain(10)
    for worker_id in (A, B, C):
        index.add_worker(worker_id, E1)
    index.apply(A, E1, [stored(*prompt[:3])])
    index.apply(B, E1, [stored(*prompt)])
    assert index.overlaps(prompt) == {A: 3, B: 10}
    assert index.overlaps([*prompt[:2], *chain(5, "other")]) == {A: 2, B: 2}
    assert index.overlaps(chain(5, "other")) == {}
    assert index.overlaps([]) == {}


def test_a_hole_ends_the_overlap(chain: Chain) -> None:
    index, prompt = MemoryIndex(), chain(4)
    index.add_worker(A, E1)
    index.apply(A, E1, [stored(prompt[0], prompt[2], prompt[3])])
    assert index.overlaps(prompt) == {A: 1}
    index.apply(A, E1, [removed(prompt[0])])
    assert index.overlaps(prompt) == {}


def test_new_epoch_purges_the_old_life_and_an_old_epoch_is_ignored(chain: Chain) -> None:
    index, prompt = MemoryIndex(), chain(4)
    index.add_worker(A, E1)
    index.apply(A, E1, [stored(*prompt)])
    index.add_worker(A, E2)
    assert index.overlaps(prompt) == {}
    index.apply(A, E1, [stored(*prompt)])
    index.add_worker(A, E1)
    assert index.overlaps(prompt) == {}
    assert index.live() == {A: E2}


def test_adding_the_same_life_again_keeps_its_chunks(chain: Chain) -> None:
    index, prompt = MemoryIndex(), chain(4)
    index.add_worker(A, E1)
    index.apply(A, E1, [stored(*prompt)])
    index.add_worker(A, E1)
    assert index.overlaps(prompt) == {A: 4}


def test_unknown_worker_changes_nothing(chain: Chain) -> None:
    index = MemoryIndex()
    index.apply(A, E1, [stored(*chain(4))])
    index.drop_worker(A)
    assert index.total_records() == 0
    assert index.live() == {}


def test_storing_twice_and_removing_once_leaves_nothing(chain: Chain) -> None:
    index, prompt = MemoryIndex(), chain(3)
    index.add_worker(A, E1)
    index.apply(A, E1, [stored(*prompt), stored(*prompt), removed(*reversed(prompt))])
    assert index.overlaps(prompt) == {}
    assert index.total_records() == 0


def test_a_reused_slot_does_not_inherit_chunks(chain: Chain) -> None:
    index, prompt = MemoryIndex(), chain(2000)
    index.add_worker(A, E1)
    index.apply(A, E1, [stored(*prompt)])
    index.drop_worker(A)
    index.add_worker(B, E1)
    while index.sweep(100):
        assert index.overlaps(prompt) == {}
    index.add_worker(C, E1)
    assert index.overlaps(prompt) == {}
    index.check_invariants()


def test_hundred_thousand_chunks_come_and_go_without_a_trace(chain: Chain) -> None:
    index, chunks = MemoryIndex(), chain(100_000)
    for worker_id in (A, B, C):
        index.add_worker(worker_id, E1)
        index.apply(worker_id, E1, [stored(*chunks)])
    assert index.overlaps(chunks) == {A: 100_000, B: 100_000, C: 100_000}
    index.apply(A, E1, [removed(*reversed(chunks))])
    index.apply(B, E1, [CLEARED])
    index.drop_worker(C)
    assert index.overlaps(chunks) == {}
    while index.sweep(10_000):
        pass
    assert index.total_records() == 0
    assert [index.chunk_count(worker_id) for worker_id in (A, B, C)] == [0, 0, 0]
    index.check_invariants()


def test_purging_a_large_worker_does_not_hold_up_the_loop(chain: Chain) -> None:
    index = MemoryIndex()
    index.add_worker(A, E1)
    index.apply(A, E1, [stored(*chain(100_000))])
    pieces = []
    started = time.perf_counter()
    index.drop_worker(A)
    pieces.append(time.perf_counter() - started)
    more = True
    while more:
        started = time.perf_counter()
        more = index.sweep(1024)
        pieces.append(time.perf_counter() - started)
    assert len(pieces) > 90
    assert sorted(pieces)[len(pieces) // 2] < 0.005


def test_a_life_that_only_goes_on_sweeps_what_others_left(chain: Chain) -> None:
    index = MemoryIndex()
    index.add_worker(A, E1)
    index.add_worker(B, E1)
    index.apply(A, E1, [stored(*chain(1000))])
    index.drop_worker(A)
    for _ in range(10):
        index.apply(B, E1, [stored(*chain(1, "b"))])
    assert index.total_records() == 1
