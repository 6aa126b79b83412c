"""Preemption: the victim, and what becomes of it."""

from __future__ import annotations

import pytest
from scheduling_world import SchedulingWorld

from worker.scheduling.preemption import Preemption
from worker.sequence import SequenceStatus
from worker.step_budget import StepBudget


def running_world(*priorities: int) -> SchedulingWorld:
    world = SchedulingWorld(64)
    for n, priority in enumerate(priorities):
        world.add([100 * n + 1, 2, 3, 4, 5], max_tokens=9, priority=priority)
        world.steps()
    return world


def preemption(world: SchedulingWorld) -> Preemption:
    return world.scheduler._preemption


@pytest.mark.parametrize(
    ("priorities", "order"),
    [((0, 0, 0), [2, 1, 0]), ((2, 1, 0), [0, 1, 2]), ((1, 0, 1, 0), [2, 0, 3, 1]), ((-3, 5, 5), [2, 1, 0])],
)
def test_the_least_urgent_goes_first_and_of_these_the_newest(priorities: tuple[int, ...], order: list[int]) -> None:
    world = running_world(*priorities)
    went: list[str] = []
    while world.running:
        before = set(world.running)
        preemption(world).preempt_one(StepBudget(10))
        went += before - set(world.running)
    assert went == [f"r{n}" for n in order]
    assert not world.scheduler.preempt_one()


def test_only_a_less_urgent_one_goes_for_one_that_waits() -> None:
    world = running_world(1, 3)
    step = StepBudget(10)
    assert not preemption(world).preempt_less_urgent(3, step)
    assert preemption(world).preempt_less_urgent(2, step)
    assert not preemption(world).preempt_less_urgent(2, step)
    assert preemption(world).preempt_less_urgent(0, step)
    assert not preemption(world).preempt_less_urgent(-9, step), "nobody runs any more"
    assert preemption(world).count == 2


def test_a_victim_gives_its_blocks_and_its_budget_back_and_keeps_its_tokens() -> None:
    world = running_world(0)
    world.steps(3)
    (seq,) = world.scheduler.running
    tokens, step = list(seq.tokens), StepBudget(10)
    step.tokens[seq.seq_id] = 4
    step.left -= 4
    preemption(world).preempt_one(step)
    assert (step.left, step.tokens) == (10, {})
    assert (seq.status, seq.num_computed, seq.tokens, seq.preemptions) == (SequenceStatus.WAITING, 0, tokens, 1)
    assert world.in_use() == 0 and world.waiting == {seq.seq_id}
    assert world.queue.num_tokens == len(tokens)


def test_any_row_stands_for_its_whole_group() -> None:
    world = SchedulingWorld(64)
    group = world.add([1, 2, 3, 4, 5], max_tokens=9, n=3)
    world.steps(3)
    step = StepBudget(10)
    for row in world.scheduler.running:
        step.tokens[row.seq_id] = 1
        step.left -= 1
    preemption(world).preempt_one(step)
    assert (step.left, step.tokens, world.running, world.waiting) == (10, {}, [], {group})
    assert world.in_use() == 0 and preemption(world).count == 1
    assert [seq.seq_id for seq in world.scheduler.sequences()] == [group]


def test_pins_are_given_up_before_anybody_goes() -> None:
    world = SchedulingWorld(8)
    world.add(list(range(1, 13)), max_tokens=1)
    world.finish()
    manager = world.fake.engine._manager
    assert manager.pin("system prompt", list(range(1, 14)), until_s=1e9) == 12
    request = world.add(list(range(500, 518)), max_tokens=10)
    world.finish()
    assert world.tokens(request) == 10 and world.preemptions == 0
    assert not manager.unpin("system prompt")
