"""MemoryIndex against a naive oracle, and its promise to free what it no longer needs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from index_twins import (
    CHUNKS,
    CLEARED,
    E1,
    E2,
    PATHS,
    WORKERS,
    A,
    B,
    C,
    Twins,
    any_operations,
    cache_work,
    closed_operations,
    removed,
    stored,
)

from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, WorkerId
from cluster.index.memory import MemoryIndex

Chain = Callable[..., list[ChunkHash]]
Operation = tuple[Any, ...]
UNKNOWN = ChunkHash(b"held by nobody..")


def random_chunks(rng: random.Random, count: int) -> list[ChunkHash]:
    packed = rng.randbytes(16 * count)
    return [ChunkHash(packed[at : at + 16]) for at in range(0, len(packed), 16)]


@settings(max_examples=3 * settings().max_examples // 2)
@given(operations=st.lists(closed_operations, max_size=25))
def test_answers_like_a_dict_of_sets(operations: list[Operation]) -> None:
    twins = Twins()
    for operation in operations:
        twins.do(*operation)
        for path in PATHS:
            for prompt in (path, [*path, UNKNOWN, UNKNOWN], [*path[:-1], UNKNOWN]):
                assert twins.index.overlaps(prompt) == twins.oracle.overlaps(prompt)
    twins.index.check_invariants()


@settings(max_examples=3 * settings().max_examples // 2)
@given(
    operations=st.lists(any_operations, max_size=15),
    prompt=st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=12, unique=True),
)
def test_with_holes_a_depth_still_ends_at_a_chunk_that_is_held(
    operations: list[Operation], prompt: list[ChunkHash]
) -> None:
    twins = Twins()
    for operation in operations:
        twins.do(*operation)
        found = twins.index.overlaps(prompt)
        assert found.keys() == {worker_id for worker_id in WORKERS if prompt[0] in twins.held(worker_id)}
        for worker_id, depth in found.items():
            assert prompt[depth - 1] in twins.held(worker_id)
            assert depth == len(prompt) or prompt[depth] not in twins.held(worker_id)
    twins.index.check_invariants()


@given(seed=st.integers(0, 2**32), depth=st.integers(1, 40), size=st.integers(1, 30))
def test_a_half_loaded_snapshot_credits_nothing_that_is_not_held(seed: int, depth: int, size: int) -> None:
    rng = random.Random(seed)
    prompt = random_chunks(rng, 40)
    held = [*prompt[:depth], *random_chunks(rng, 30)]
    rng.shuffle(held)
    index = MemoryIndex()
    index.add_worker(A, E1)
    for start in range(0, len(held), size):
        index.apply(A, E1, [stored(*held[start : start + size])])
        assert index.overlaps(prompt).get(A, 0) <= depth
    assert index.overlaps(prompt) == {A: depth}


@given(
    before=st.lists(cache_work, max_size=6),
    meanwhile=st.lists(cache_work, max_size=8),
    page_order=st.permutations(CHUNKS),
    page_times=st.lists(st.integers(0, 8), min_size=len(CHUNKS), max_size=len(CHUNKS)),
)
def test_pages_read_while_a_worker_goes_on_are_harmless_and_exact_in_the_end(
    before: list[Operation], meanwhile: list[Operation], page_order: list[ChunkHash], page_times: list[int]
) -> None:
    worker, index = Twins(), MemoryIndex()
    index.add_worker(A, E1)
    for operation in before:
        worker.do(*operation)
    worker.log.clear()
    moments = [set(worker.held(A))]
    for operation in meanwhile:
        worker.do(*operation)
        moments.append(set(worker.held(A)))
    pages = [chunk for chunk, t in zip(page_order, page_times, strict=True) if chunk in moments[t % len(moments)]]

    def check() -> None:
        for path in PATHS:
            depth = index.overlaps(path).get(A, 0)
            assert any(set(path[:depth]) <= moment for moment in moments)

    for chunk in pages:
        index.apply(A, E1, [stored(chunk)])
        check()
    for event in [event for worker_id, event in worker.log if worker_id == A]:
        index.apply(A, E1, [event])
        check()
    for path in PATHS:
        assert index.overlaps(path).get(A, 0) == worker.oracle.overlaps(path).get(A, 0)


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


def test_without_the_first_chunk_there_is_no_overlap(chain: Chain) -> None:
    index, prompt = MemoryIndex(), chain(4)
    index.add_worker(A, E1)
    index.apply(A, E1, [stored(*prompt[1:])])
    assert index.overlaps(prompt) == {}


def test_many_workers_at_many_depths(chain: Chain) -> None:
    index, prompt = MemoryIndex(), chain(256)
    depths = {WorkerId(f"w{number}"): 1 + number % 7 * 40 for number in range(300)}
    for worker_id, depth in depths.items():
        index.add_worker(worker_id, E1)
        index.apply(worker_id, E1, [stored(*prompt[:depth])])
    index.drop_worker(WorkerId("w7"))
    del depths[WorkerId("w7")]
    assert index.overlaps(prompt) == depths


class CountedPrompt(list[ChunkHash]):
    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)


def test_a_lookup_reads_few_chunks_of_a_long_prompt(chain: Chain) -> None:
    index, prompt = MemoryIndex(), CountedPrompt(chain(4096))
    for number in range(100):
        worker_id = WorkerId(f"w{number}")
        index.add_worker(worker_id, E1)
        index.apply(worker_id, E1, [stored(*prompt[: (16, 3000, 4096)[number % 3]])])
    prompt.reads = 0
    assert set(index.overlaps(prompt).values()) == {16, 3000, 4096}
    assert prompt.reads <= 1 + 3 * 12
    nobody = CountedPrompt(chain(4096, "other"))
    assert index.overlaps(nobody) == {}
    assert nobody.reads == 1


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
    assert index.slot_count() == 2
    index.check_invariants()


def test_a_life_retired_during_a_pass_waits_for_the_next(chain: Chain) -> None:
    index, prompt = MemoryIndex(), chain(3000)
    for worker_id in (A, B, C):
        index.add_worker(worker_id, E1)
        index.apply(worker_id, E1, [stored(*prompt)])
    index.drop_worker(A)
    assert index.sweep(1500)
    index.drop_worker(B)
    while index.sweep(1500):
        index.check_invariants()
        assert index.overlaps(prompt) == {C: 3000}
    index.check_invariants()
    assert index.total_records() == 3000


def test_hundreds_of_lives_need_few_slots(chain: Chain) -> None:
    index, prompt = MemoryIndex(), chain(50)
    for life in range(1, 301):
        index.add_worker(A, Epoch(life))
        index.apply(A, Epoch(life), [stored(*prompt)])
        index.add_worker(B, Epoch(life))  # holds nothing: free again without a pass
        while life % 10 == 0 and index.sweep(1000):
            pass
    assert index.overlaps(prompt) == {A: 50}
    assert index.slot_count() <= 12
    index.check_invariants()


def test_a_life_that_only_goes_on_sweeps_what_others_left(chain: Chain) -> None:
    index = MemoryIndex()
    index.add_worker(A, E1)
    index.add_worker(B, E1)
    index.apply(A, E1, [stored(*chain(1000))])
    index.drop_worker(A)
    for _ in range(50):
        index.apply(B, E1, [stored(*chain(1, "b"))])
    assert index.total_records() == 1


def test_hundred_thousand_chunks_come_and_go_without_a_trace(chain: Chain) -> None:
    index, chunks = MemoryIndex(), chain(100_000)
    empty_bytes = index.table_bytes()
    for worker_id in (A, B, C):
        index.add_worker(worker_id, E1)
        index.apply(worker_id, E1, [stored(*chunks)])
    assert index.overlaps(chunks) == {A: 100_000, B: 100_000, C: 100_000}
    assert index.table_bytes() > empty_bytes + 2_000_000
    index.apply(A, E1, [removed(*reversed(chunks))])
    index.apply(B, E1, [CLEARED])
    index.drop_worker(C)
    assert index.overlaps(chunks) == {}
    while index.sweep(10_000):
        pass
    assert index.total_records() == 0
    assert index.table_bytes() == empty_bytes
    assert [index.chunk_count(worker_id) for worker_id in (A, B, C)] == [0, 0, 0]
    index.check_invariants()


def test_one_slice_of_sweeping_is_bounded(chain: Chain) -> None:
    index = MemoryIndex()
    index.add_worker(A, E1)
    index.apply(A, E1, [stored(*chain(100_000))])
    index.drop_worker(A)
    freed, before, more = [], index.total_records(), True
    assert before == 100_000
    while more:
        more = index.sweep(1024)
        freed.append(before - index.total_records())
        before = index.total_records()
    assert sum(freed) == 100_000
    assert max(freed) <= 1024


def test_a_million_prompts_through_a_small_cache_leave_the_size_of_the_cache() -> None:
    index, rng, cached = MemoryIndex(), random.Random(0), 2000
    index.add_worker(A, E1)
    kept = random_chunks(rng, cached)
    index.apply(A, E1, [stored(*kept)])
    for _ in range(500):
        new = random_chunks(rng, cached)  # each a prompt of its own
        index.apply(A, E1, [stored(*new), removed(*kept)])
        kept = new
    assert index.total_records() == index.chunk_count(A) == cached
    assert all(index.overlaps([chunk]) == {A: 1} for chunk in kept[:100])
    assert index.table_bytes() < 1_000_000
