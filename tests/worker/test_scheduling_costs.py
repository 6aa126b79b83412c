"""What the scheduler costs, in counted operations: nothing that grows with the square of anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from scheduling_world import SchedulingWorld

from worker.kvcache import radix_tree
from worker.kvcache.chunk_hash_cache import ChunkHashCache
from worker.kvcache.radix_node import RadixNode
from worker.kvcache.radix_tree import RadixTree
from worker.scheduling.prefix_holds import PrefixHolds
from worker.scheduling.waiting_queue import LOOKS_PER_CHOICE, LOOKS_PER_STEP
from worker.sequence import Sequence


def counted(owner: Any, name: str, counts: Counter[str], size: Any = lambda *args: 1) -> Any:
    """Patch a function so that each call adds `size` of its arguments."""
    inner = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] += size(*args)
        return inner(*args, **kwargs)

    return mock.patch.object(owner, name, call)


@pytest.fixture
def counts() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    with (
        counted(radix_tree, "pack", counts, len),
        counted(RadixNode, "common_blocks", counts),
        counted(RadixTree, "match", counts),
        counted(RadixTree, "insert", counts),
        counted(ChunkHashCache, "match", counts),
        counted(ChunkHashCache, "insert", counts),
        counted(Sequence, "num_shared_tokens", counts),
    ):
        yield counts


def cost_of_prompt(counts: Counter[str], pieces: int, cache: str) -> Counter[str]:
    """A prompt of `pieces` blocks of 4, computed a block a step, with one request that waits behind it."""
    world = SchedulingWorld(2 * pieces + 8, token_budget=4, prefix_cache=cache, max_num_seqs=1)
    world.fake.engine._check = False
    world.add(list(range(4 * pieces)), max_tokens=1)
    world.add([7, 8, 9], max_tokens=1)
    counts.clear()
    world.steps(pieces)
    assert world.fake.runner.steps == pieces and world.tokens("r0") == 1
    return Counter(counts)


@pytest.mark.parametrize("cache", ["radix", "chunk"])
def test_a_prompt_in_pieces_costs_in_proportion_to_its_length(counts: Counter[str], cache: str) -> None:
    one, two, four = (cost_of_prompt(counts, pieces, cache) for pieces in (20, 40, 80))
    assert one["insert"] == 20 and four["insert"] == 80
    for name in four:
        assert two[name] <= 2 * one[name] + 8 and four[name] <= 4 * one[name] + 16, (name, one, two, four)
    if cache == "radix":
        assert four["pack"] <= 6 * 4 * 80, "each token is packed a few times, not once per piece"


def waiting_world(count: int, **options: Any) -> SchedulingWorld:
    world = SchedulingWorld(64, max_num_seqs=1, max_queue=10_000, **options)
    world.fake.engine._check = False
    world.add([900, 901], max_tokens=100)
    world.steps()
    for n in range(count):
        world.add([n % 900, n // 900, 5, 6, 7, 8, 9, 10, 11], max_tokens=1, priority=n % 3)
    return world


@pytest.mark.parametrize("scheduling", ["prefix", "fcfs"])
def test_a_step_with_1000_waiting_looks_at_as_few_as_with_10(scheduling: str, counts: Counter[str]) -> None:
    costs = []
    for waiting in (10, 1000):
        world = waiting_world(waiting, scheduling=scheduling)
        before = world.queue.num_looks
        counts.clear()
        world.steps(20)
        assert world.queue.num_looks - before <= 20 * (LOOKS_PER_CHOICE + LOOKS_PER_STEP)
        costs.append(counts["match"] + counts["num_shared_tokens"])
    assert costs[1] <= costs[0] + 5


def test_a_step_that_admits_looks_a_bounded_number_of_times_for_each() -> None:
    world = waiting_world(1000)
    world.cancel("r0")
    for _ in range(100):
        before, admitted = world.queue.num_looks, world.scheduler._admission.num_admitted
        world.steps()
        came_in = world.scheduler._admission.num_admitted - admitted
        assert came_in <= 1
        assert world.queue.num_looks - before <= LOOKS_PER_STEP + (came_in + 1) * LOOKS_PER_CHOICE


@pytest.mark.parametrize(
    ("ageing_s", "options"),
    [(2.0, {}), (float("inf"), {}), (0.0, {}), (2.0, {"scheduling": "fcfs"})],
    ids=str,
)
def test_what_has_left_does_not_stay_in_the_heaps(ageing_s: float, options: dict[str, Any]) -> None:
    """Found here: the heap by age was never cleared in the order of arrival, or while its oldest one starved."""
    world = SchedulingWorld(64, max_num_seqs=1, ageing_s=ageing_s, **options)
    world.fake.engine._check = False
    hot = list(range(1, 13))
    world.add(hot, max_tokens=1)
    world.steps()
    world.add([*hot, 1], max_tokens=1)
    world.add([800, 801, 802], max_tokens=1)
    for n in range(400):
        world.add([*hot, 100 + n], max_tokens=1)
        if n % 3 == 0:
            world.cancel(f"r{n}")
        world.steps()
        for members in world.queue._classes.values():
            assert len(members._by_key) <= 2 * members.count + 16
            assert len(members._by_age) <= 2 * members.count + 16
        assert len(world.queue._turns) <= 2 * len(world.queue) + 16
        assert len(world.scheduler._holds._since) <= len(world.queue) + 1


@pytest.mark.parametrize("priority", [0, 3])
def test_preempting_again_and_again_leaves_nothing_in_the_heaps(priority: int) -> None:
    world = SchedulingWorld(64)
    world.fake.engine._check = False
    request = world.add([1, 2, 3], max_tokens=250, priority=priority)
    blocker = world.add([4, 5], max_tokens=250, priority=priority)
    for _ in range(200):
        world.steps()
        world.scheduler.preempt_one()
        for members in world.queue._classes.values():
            assert max(len(members._by_key), len(members._by_age)) <= 2 * members.count + 16
        assert len(world.queue._turns) <= 2 * len(world.queue) + 16
    world.finish()
    assert world.ended(request, blocker)


def held_world(count: int) -> SchedulingWorld:
    prefix = list(range(1, 17))
    world = SchedulingWorld(128, max_queue=10_000, max_num_seqs=4)
    world.fake.engine._check = False
    world.add([*prefix, *range(100, 160)], max_tokens=1, prompt_logprobs=0)
    world.steps()
    for n in range(count):
        world.add([*prefix, 200 + n % 700, n // 700], max_tokens=1)
    world.steps()
    assert len(world.held) == count
    return world


def test_a_step_costs_the_same_however_many_are_held(counts: Counter[str]) -> None:
    costs = []
    with mock.patch("worker.step_budget.MAX_SCORED", 1):
        for held in (10, 500):
            world = held_world(held)
            looks = world.queue.num_looks
            counts.clear()
            with counted(PrefixHolds, "try_hold", counts), mock.patch("heapq.heappop", side_effect=AssertionError):
                world.steps(10)
            assert len(world.held) == held
            costs.append((dict(counts), world.queue.num_looks - looks))
    assert costs[0] == costs[1]


def test_ending_a_hold_costs_one_look_each(counts: Counter[str]) -> None:
    with mock.patch("worker.step_budget.MAX_SCORED", 1):
        world = held_world(300)
        looks = world.queue.num_looks
        world.cancel("r0")
        world.scheduler._holds.release(world.clock.now)
    assert world.held == set() and world.queue.num_looks - looks == 300
