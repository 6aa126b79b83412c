"""Admission: who starts, with what, and what a refused start leaves behind."""

from __future__ import annotations

import pytest
from scheduling_world import SchedulingWorld

from worker.scheduling.admission import Admission
from worker.step_budget import StepBudget

PREFIX = list(range(1, 17))


def admit(world: SchedulingWorld, budget: int = 100) -> tuple[bool, StepBudget]:
    """Ask for the queue's first."""
    seq, step = world.queue.first(world.clock.now), StepBudget(budget)
    assert seq is not None
    return admission(world).admit(seq, step, [], world.clock.now), step


def admission(world: SchedulingWorld) -> Admission:
    return world.scheduler._admission


def test_who_starts_gets_all_its_blocks_and_the_rest_of_the_budget() -> None:
    world = SchedulingWorld()
    request = world.add(PREFIX, max_tokens=2)
    admitted, step = admit(world, budget=5)
    assert admitted and step.tokens == {request: 5} and step.left == 0
    assert world.in_use() == 4 and world.running == [request] and len(world.queue) == 0
    assert admission(world).num_admitted == 1


def test_a_refused_start_changes_nothing() -> None:
    world = SchedulingWorld(12)
    world.add(list(range(500, 530)), max_tokens=5)
    world.steps()
    waits = world.add([*PREFIX, *range(200, 210)], max_tokens=2)
    before = (world.fake.engine._manager.counts(), world.queue.num_tokens, admission(world).query_tokens)
    admitted, step = admit(world)
    assert not admitted and step.tokens == {} and step.left == 100
    assert before == (world.fake.engine._manager.counts(), world.queue.num_tokens, admission(world).query_tokens)
    assert world.waiting == {waits}
    world.fake.engine._manager.check_invariants()


@pytest.mark.parametrize(
    ("options", "seats"), [({}, 1), ({"n": 3}, 3), ({"best_of": 4, "n": 2}, 4), ({"beam_width": 3}, 3)]
)
def test_a_request_takes_the_seats_of_all_its_rows(options: dict[str, int], seats: int) -> None:
    for free, fits in ((seats - 1, False), (seats, True)):
        world = SchedulingWorld(64, max_num_seqs=8)
        for n in range(8 - free):
            world.add([100 + n, 7], max_tokens=30)
        world.steps()
        world.add(PREFIX, max_tokens=4, **options)
        assert admit(world)[0] == fits


def test_lookups_and_hits_are_counted_once_for_each_request() -> None:
    world = SchedulingWorld()
    world.add(PREFIX, max_tokens=6)
    world.steps(2)
    for _ in range(3):
        world.scheduler.preempt_one()
        world.steps()
    assert (admission(world).query_tokens, admission(world).hit_tokens) == (16, 0)
    world.add([*PREFIX, 9], max_tokens=1, n=2)
    world.steps()
    assert (admission(world).query_tokens, admission(world).hit_tokens) == (16 + 17, 16)
    world.add(PREFIX, max_tokens=1, prompt_logprobs=0)
    world.finish()
    assert (admission(world).query_tokens, admission(world).hit_tokens) == (16 + 17, 16), "it may not look"


def test_a_group_whose_prompt_is_cached_starts_with_its_rows() -> None:
    world = SchedulingWorld()
    world.add(PREFIX, max_tokens=1)
    world.steps()
    group = world.add([*PREFIX, 9], max_tokens=4, n=3)
    admitted, step = admit(world)
    assert admitted and step.tokens == {f"{group}/{n}": 1 for n in range(3)}


def test_a_group_with_a_prompt_of_one_token_starts_with_its_rows() -> None:
    world = SchedulingWorld()
    group = world.add([5], max_tokens=4, n=3)
    admitted, step = admit(world, budget=2)
    assert admitted and step.tokens == {f"{group}/{n}": 1 for n in range(2)} and len(world.scheduler.running) == 3
    assert admission(world).query_tokens == 1
