"""Memory policies and the drive: first fit and its holes, copies and their peak, preemption, and what a run counts."""

from __future__ import annotations

import itertools
import random

import pytest

from cluster.lab.contiguous_arena import ContiguousArena
from cluster.lab.memory_counts import (
    BLOCK_SIZE,
    GROW_DOUBLE,
    GROW_ONE,
    MAX_MODEL_LEN,
    PAGED,
    RESERVE_MAX,
    RESERVE_OWN,
    count_memory,
    doubled,
    policies,
)
from cluster.lab.memory_drive import DriveRecord, drive
from cluster.lab.memory_policy import GrowingMemory, ReservedMemory
from cluster.lab.mixed_requests import MixedRequest, mixed_requests
from cluster.lab.paged_memory import PagedMemory


def request(name: str, prompt: int, asked: int, answer: int) -> MixedRequest:
    return MixedRequest(name, prompt, asked, answer)


def test_first_fit_leaves_holes_that_are_enough_only_together() -> None:
    arena = ContiguousArena(100)
    starts = [arena.take(length) for length in (30, 20, 30, 20)]
    assert starts == [0, 30, 50, 80] and arena.take(1) is None
    arena.give_back(0, 30)
    arena.give_back(50, 30)
    assert (arena.free, arena.largest_hole, arena.take(40)) == (60, 30, None)
    arena.give_back(30, 20)
    assert (arena.largest_hole, arena.take(70), arena.take(10), arena.take(1)) == (80, 0, 70, None)


def test_the_arena_keeps_its_sum_whatever_comes_and_goes() -> None:
    rng, arena = random.Random(1), ContiguousArena(500)
    held: dict[int, int] = {}
    for _ in range(2000):
        length = rng.randint(1, 60)
        start = arena.take(length)
        if start is not None:
            assert all(start + length <= s or s + n <= start for s, n in held.items())
            held[start] = length
        if held and rng.random() < 0.55:
            start = rng.choice(list(held))
            arena.give_back(start, held.pop(start))
        assert arena.free == 500 - sum(held.values())
    for start, length in held.items():
        arena.give_back(start, length)
    assert arena.largest_hole == 500


def test_a_refusal_beside_holes_is_told_and_changes_nothing() -> None:
    policy = ReservedMemory(100, lambda one: one.longest)
    for name, longest in (("a", 40), ("b", 20), ("c", 40)):
        assert policy.admit(request(name, 10, longest - 10, 5))
    policy.release("a")
    policy.release("c")
    assert not policy.admit(request("d", 10, 50, 5))
    assert (policy.unusable, policy.allocated) == (80, 20)
    assert not policy.admit(request("e", 10, 80, 5))
    assert policy.unusable == 0  # not even together


def test_growing_counts_both_tensors_while_it_copies() -> None:
    policy = GrowingMemory(1000, doubled)
    assert policy.admit(request("a", 60, 100, 100))
    assert (policy.allocated, policy.take_top()) == (64, 64)
    assert policy.grow("a", 64) and policy.copied == 0
    assert policy.grow("a", 65)
    assert (policy.allocated, policy.take_top(), policy.copied) == (128, 192, 64)
    assert policy.take_top() == 128


def test_a_copy_that_finds_no_room_is_refused() -> None:
    policy = GrowingMemory(250, doubled)
    assert policy.admit(request("a", 64, 100, 100))
    assert not policy.admit(request("b", 65, 100, 100))  # 64 + 128 leave no room to copy the larger
    assert policy.grow("a", 65) and not policy.grow("a", 129)
    assert policy.allocated == 128


@pytest.mark.parametrize("name", list(policies()))
def test_every_request_gets_all_its_tokens(name: str) -> None:
    requests = mixed_requests(40, seed=3)
    record = drive(requests, policies()[name](1024))
    assert record.generated == sum(one.answer_tokens for one in requests)
    assert record.peak <= 1024


def test_who_is_preempted_is_the_newest_and_ends_all_the_same() -> None:
    pool = PagedMemory(6, BLOCK_SIZE)
    requests = [request("old", 30, 60, 40), request("new", 30, 60, 40)]
    record = drive(requests, pool)
    assert record.preemptions > 0
    assert pool.blocks_in_use == 0
    assert record.generated == 80


def test_paged_memory_wastes_less_than_a_block_a_request() -> None:
    record = drive(mixed_requests(60, seed=5), PagedMemory(200, BLOCK_SIZE))
    for sample in record.samples:
        assert 0 <= sample.allocated - sample.used < BLOCK_SIZE * max(1, sample.running)


def test_arrivals_are_spread() -> None:
    record = drive(mixed_requests(10, seed=0), policies()[RESERVE_MAX](10 * MAX_MODEL_LEN), every=5)
    arrived = [record.samples[step].running for step in (0, 4)]
    assert arrived == [1, 1] and record.samples[5].running == 2


@pytest.fixture(scope="module")
def counts() -> tuple[dict[str, DriveRecord], dict[str, DriveRecord], int, float]:
    many = mixed_requests(60, seed=0)
    found = count_memory(many[:30], many, 2048)
    return found.unlimited, found.budget, found.smallest_pool, found.saving


Counts = tuple[dict[str, DriveRecord], dict[str, DriveRecord], int, float]


def test_the_same_work_peaks_in_this_order(counts: Counts) -> None:
    unlimited = counts[0]
    assert len({record.peak_used for record in unlimited.values()}) == 1
    assert unlimited[PAGED].peak < unlimited[RESERVE_OWN].peak < unlimited[RESERVE_MAX].peak
    assert unlimited[PAGED].copied == unlimited[RESERVE_MAX].copied == 0
    assert unlimited[GROW_ONE].copied > 10 * unlimited[GROW_DOUBLE].copied > 0


def test_bytes_copied_by_concatenation_are_the_sum_of_all_lengths(counts: Counts) -> None:
    few = mixed_requests(60, seed=0)[:30]
    expected = sum(sum(range(one.prompt_tokens, one.total)) for one in few)
    assert counts[0][GROW_ONE].copied == expected


def test_one_long_request_shows_the_three_shapes() -> None:
    alone = count_memory(mixed_requests(4, 0), mixed_requests(4, 0), 1024).alone
    shapes = {name: {sample.top for sample in record.samples} for name, record in alone.items()}
    assert shapes[RESERVE_MAX] == {MAX_MODEL_LEN}
    assert sorted(shapes[GROW_DOUBLE]) == [64, 128, 64 + 128, 256, 128 + 256, 512, 256 + 512]
    stairs = sorted(shapes[PAGED])
    assert {after - before for before, after in itertools.pairwise(stairs)} == {BLOCK_SIZE}


def test_equal_reservations_never_have_holes_and_unlike_ones_do(counts: Counts) -> None:
    budget = counts[1]
    assert budget[RESERVE_MAX].steps_with_holes == budget[PAGED].steps_with_holes == 0
    assert budget[RESERVE_OWN].steps_with_holes > 0
    assert budget[PAGED].mean_running > budget[RESERVE_OWN].mean_running > budget[RESERVE_MAX].mean_running


def test_one_block_less_than_the_smallest_pool_makes_somebody_wait(counts: Counts) -> None:
    unlimited, _, smallest, _ = counts
    few = mixed_requests(60, seed=0)[:30]
    enough, short = (drive(few, PagedMemory(blocks, BLOCK_SIZE), every=2) for blocks in (smallest, smallest - 1))
    assert (enough.steps, enough.preemptions) == (unlimited[PAGED].steps, 0)
    assert (short.steps, short.preemptions) != (enough.steps, 0) or smallest == unlimited[PAGED].peak // BLOCK_SIZE
