"""WaitingQueue against a table that is sorted again for every question."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from worker.scheduling.waiting_queue import LOOKS_PER_CHOICE, LOOKS_PER_STEP, WaitingQueue
from worker.sequence import Sequence


class World:
    """`cached` is the cache: how much of each prompt it has. As far as the queue is told, it changes all the time."""

    def __init__(self, ageing_s: float = 2.0, **options: Any) -> None:
        self.cached: dict[str, int] = {}
        self.looked: list[str] = []
        self.changes: Iterator[int] = itertools.count()
        self.queue = WaitingQueue(self._look, lambda: next(self.changes), ageing_s, **options)
        self.count = 0

    def _look(self, seq: Sequence) -> int:
        self.looked.append(seq.seq_id)
        return self.cached.get(seq.seq_id, 0)

    def make(self, at: float = 0.0, cached: int = 0, priority: int = 0, length: int = 9, router: str = "r") -> Sequence:
        name = f"s{self.count}"
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=tuple(range(length)),
            sampling=SamplingParams(),
            priority=priority,
            router_id=router,
        )
        seq = Sequence(request, 5, ())
        seq.arrival, seq.arrived_at = self.count, at
        self.count += 1
        self.cached[name] = cached
        return seq

    def add(self, **options: Any) -> Sequence:
        seq = self.make(**options)
        self.queue.add(seq)
        return seq

    def order(self, now: float = 0.0) -> list[Sequence]:
        """Take all, one by one."""
        taken = []
        while (seq := self.queue.first(now)) is not None:
            self.queue.remove(seq)
            taken.append(seq)
        return taken


def test_longest_cached_prefix_first_then_the_oldest() -> None:
    world = World()
    short, long, old, new = (world.add(cached=cached) for cached in (2, 8, 4, 4))
    assert world.order() == [long, old, new, short]


def test_who_waits_for_the_bound_goes_first_the_oldest_before() -> None:
    world = World()
    cold, colder = world.add(at=0.0), world.add(at=0.5)
    hot = world.add(at=1.0, cached=8)
    assert world.queue.first(1.99) is hot
    assert world.queue.first(2.0) is cold
    world.queue.remove(cold)
    assert world.queue.first(2.0) is hot
    assert world.queue.first(2.5) is colder


def test_preempted_ones_go_first_in_the_order_of_arrival() -> None:
    world = World()
    aged = world.add(at=-100.0)
    first, second = world.make(), world.make()
    for seq in (second, first):
        seq.preemptions = 1
        world.queue.add(seq)
    assert world.order(now=0.0) == [first, second, aged]


def test_classes_are_strict() -> None:
    world = World()
    low, high, lowest = (world.add(priority=p, cached=8 - 2 * p) for p in (1, -5, 3))
    assert world.order(now=100.0) == [high, low, lowest]


def test_a_held_one_is_never_next_and_keeps_its_age() -> None:
    world = World()
    held, other = world.add(at=0.0), world.add(at=1.0, cached=8)
    world.queue.hold(held, "leader")
    assert world.queue.first(50.0) is other and world.queue.num_held == 1
    world.queue.remove(other)
    assert world.queue.first(50.0) is None and len(world.queue) == 1
    late = world.add(at=2.0, cached=8)
    world.queue.release(held)
    assert world.queue.first(50.0) is held and world.queue.num_held == 0
    world.queue.remove(held)
    assert world.order() == [late]


def test_a_class_of_held_ones_lets_the_next_class_go() -> None:
    world = World()
    urgent, patient = world.add(priority=0), world.add(priority=1)
    world.queue.hold(urgent, "leader")
    assert world.queue.first(0.0) is patient


def test_a_held_one_can_be_removed() -> None:
    world = World()
    seq = world.add()
    world.queue.hold(seq, "leader")
    world.queue.remove(seq)
    assert (len(world.queue), world.queue.num_held, world.queue.num_tokens, seq.held_by) == (0, 0, 0, None)


def test_before_one_is_next_its_prefix_is_looked_at_again() -> None:
    world = World()
    was_hot, now_hot = world.add(cached=8), world.add(cached=4)
    world.cached["s0"] = 0
    assert world.queue.first(0.0) is now_hot
    world.cached["s1"] = 2
    assert world.queue.first(0.0) is now_hot
    world.queue.remove(now_hot)
    assert world.order() == [was_hot]


def test_what_became_hot_is_noticed_in_turn() -> None:
    world = World()
    others = [world.add(cached=2) for _ in range(10)]
    world.cached["s7"] = 8
    for _ in range(-(-10 // LOOKS_PER_STEP)):
        world.queue.refresh()
    assert world.queue.first(0.0) is others[7]


def test_looks_are_bounded() -> None:
    world = World()
    for _ in range(1000):
        world.add(cached=8)
    world.cached.clear()
    world.queue.first(0.0)
    assert world.queue.num_looks - 1000 <= LOOKS_PER_CHOICE
    before = world.queue.num_looks
    world.queue.refresh()
    assert world.queue.num_looks - before <= LOOKS_PER_STEP
    assert world.queue.num_looks == len(world.looked)


def test_nobody_is_looked_at_twice_in_the_same_state_of_the_cache() -> None:
    world = World()
    world.changes = itertools.repeat(7)
    first, second = world.add(cached=2), world.add(cached=1)
    world.cached["s1"] = 8
    world.queue.refresh()
    assert world.queue.first(0.0) is first and world.looked == ["s0", "s1"]
    world.changes = itertools.repeat(8)
    world.queue.refresh()
    assert world.queue.first(0.0) is second and world.looked == ["s0", "s1", "s0", "s1"]


@pytest.mark.parametrize("options", [{"prefix_first": False}, {"ageing_s": 0.0}], ids=str)
def test_in_the_order_of_arrival(options: dict[str, Any]) -> None:
    world = World(**options)
    seqs = [world.add(cached=cached) for cached in (0, 8, 2, 6)]
    world.queue.refresh()
    assert world.order() == seqs


def test_tokens_are_counted_by_router() -> None:
    world = World()
    a, b = world.add(router="a", length=9, cached=4), world.add(router="b", length=7)
    whole = world.add(router="a", length=5, cached=5)
    assert dict(world.queue.uncached_tokens) == {"a": 5 + 1, "b": 7} and world.queue.num_tokens == 21
    world.cached["s0"] = 8
    world.queue.refresh()
    assert dict(world.queue.uncached_tokens) == {"a": 1 + 1, "b": 7}
    for seq in (a, b, whole):
        world.queue.remove(seq)
    assert dict(world.queue.uncached_tokens) == {} and world.queue.num_tokens == 0


def wanted(world: World, now: float, ageing_s: float) -> Sequence | None:
    """By sorting all of them; what is cached has not changed since it was looked at."""
    eligible = [seq for seq in world.queue if seq.held_by is None]
    if not eligible:
        return None
    priority = min(seq.request.priority for seq in eligible)
    mine = [seq for seq in eligible if seq.request.priority == priority]
    by_age = sorted(mine, key=lambda seq: seq.arrival)
    preempted = [seq for seq in by_age if seq.preemptions]
    aged = [seq for seq in by_age if now - seq.arrived_at >= ageing_s]
    return next(iter(preempted + aged), min(by_age, key=lambda seq: -world.cached[seq.seq_id]))


scripts = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "take", "remove", "hold", "release", "preempt", "wait"]),
        st.integers(0, 20),
        st.integers(0, 2),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(scripts, st.sampled_from([0.0, 3.0, float("inf")]))
def test_as_a_sorted_table_would_do_it(script: list[tuple[str, int, int]], ageing_s: float) -> None:
    world, now = World(ageing_s), 0.0
    gone: list[Sequence] = []
    for what, number, priority in script:
        waiting = [seq for seq in world.queue if seq.held_by is None]
        held = [seq for seq in world.queue if seq.held_by is not None]
        if what == "add":
            world.add(at=now, cached=number % 9, priority=priority)
        elif what == "wait":
            now += priority
        elif what == "take" and (seq := world.queue.first(now)) is not None:
            world.queue.remove(seq)
            gone.append(seq)
        elif what == "preempt" and gone:
            seq = gone.pop(number % len(gone))
            seq.preemptions += 1
            world.queue.add(seq)
        elif what == "remove" and waiting + held:
            gone.append((waiting + held)[number % len(waiting + held)])
            world.queue.remove(gone[-1])
        elif what == "hold" and waiting:
            world.queue.hold(waiting[number % len(waiting)], "leader")
        elif what == "release" and held:
            world.queue.release(held[number % len(held)])
        world.queue.refresh()
        assert world.queue.first(now) is wanted(world, now, ageing_s)
        assert world.queue.num_held == sum(seq.held_by is not None for seq in world.queue)
