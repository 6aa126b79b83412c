"""Holding back: a new prefix is computed once, and nobody waits for it longer than it is worth."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import fake_engine as fakes
import pytest
from scheduling_world import SchedulingWorld

PREFIX = list(range(1, 17))
LEADER = [*PREFIX, *range(100, 124)]
OTHER = list(range(600, 606))


@pytest.fixture(params=[1, 4])
def scored(request: pytest.FixtureRequest) -> Iterator[int]:
    """Prompts whose log probabilities are wanted are computed so many tokens a step: leaders that take their time."""
    with mock.patch("worker.step_budget.MAX_SCORED", request.param):
        yield int(request.param)


def slow_leader(world: SchedulingWorld, prompt: list[int] = LEADER, **options: object) -> str:
    leader = world.add(prompt, max_tokens=4, prompt_logprobs=0, **options)
    world.steps()
    return leader


def computed_by(world: SchedulingWorld, request_id: str) -> int:
    return world.scheduler._live[request_id].num_computed


def test_until_the_shared_part_is_there_and_not_the_leaders_whole_prompt(scored: int) -> None:
    world = SchedulingWorld()
    leader = slow_leader(world)
    follower = world.add([*PREFIX, 70, 71], max_tokens=4)
    while computed_by(world, leader) < len(PREFIX):
        world.steps()
        assert world.held == {follower} and world.tokens(follower) == 0
    before = world.computed
    world.steps()
    assert world.held == set() and world.running == [leader, follower]
    assert world.computed - before == scored + 2, "it computed its own two tokens only"
    assert computed_by(world, leader) < len(LEADER)
    world.finish()
    assert world.fake.cached[follower] == len(PREFIX)
    world.settled()


def test_until_the_leader_is_cancelled(scored: int) -> None:
    world = SchedulingWorld()
    leader = slow_leader(world)
    followers = [world.add([*PREFIX, 70 + n, 71], max_tokens=4) for n in range(3)]
    world.steps()
    assert world.held == set(followers)
    world.cancel(leader)
    world.steps()
    assert world.running == followers[:1] and world.held == set(followers[1:]), "one of them leads now"
    world.finish()
    for n, follower in enumerate(followers):
        assert world.fake.answers[follower] == fakes.expected_answer([*PREFIX, 70 + n, 71], 4)
    world.settled()


def test_until_the_leader_is_preempted(scored: int) -> None:
    world = SchedulingWorld(max_num_seqs=2)
    leader = slow_leader(world, priority=1)
    follower = world.add([*PREFIX, 70, 71], max_tokens=4, priority=1)
    world.steps()
    assert world.held == {follower}
    urgent = [world.add([800 + n, 801], max_tokens=6) for n in range(2)]
    world.steps()
    assert world.running == urgent
    world.steps()
    assert world.waiting == {leader, follower}
    world.finish()
    assert world.fake.answers[follower] == fakes.expected_answer([*PREFIX, 70, 71], 4)
    world.settled()


def test_until_the_leaders_deadline(scored: int) -> None:
    world = SchedulingWorld(step_s=1.0, ageing_s=1000.0)
    slow_leader(world, timeout_s=2.5)
    follower = world.add([*PREFIX, 70, 71], max_tokens=4)
    world.steps()
    assert world.held == {follower}
    world.steps()
    assert world.running == [follower]
    world.finish()
    world.settled()


def test_until_the_hold_has_lasted_for_the_ageing_bound_and_then_never_again() -> None:
    with mock.patch("worker.step_budget.MAX_SCORED", 1):
        world = SchedulingWorld(step_s=0.5, ageing_s=2.0, max_num_seqs=2)
        leader = slow_leader(world)
        follower = world.add([*PREFIX, 70, 71], max_tokens=4)
        held_for = 0
        while world.tokens(follower) == 0:
            world.steps()
            held_for += follower in world.held
        assert held_for == 4 and computed_by(world, leader) < len(PREFIX)
        world.scheduler.preempt_one()
        world.steps()
        assert follower in world.running, "the same leader does not hold it again"
        world.finish()
        world.settled()


def test_who_arrived_long_ago_may_still_be_held_for_as_long() -> None:
    """The bound of a hold is counted from its own beginning."""
    with mock.patch("worker.step_budget.MAX_SCORED", 4):
        world = SchedulingWorld(step_s=0.5, ageing_s=2.0, max_num_seqs=2)
        world.add(OTHER, max_tokens=12)
        world.add([*OTHER, 1], max_tokens=14)
        follower = world.add([*PREFIX, 70, 71], max_tokens=4, priority=1)
        world.steps(11)
        slow_leader(world)
        world.steps(2)
        assert world.clock.now - world.scheduler._live[follower].arrived_at > 2.0 and world.held == {follower}
        world.finish()
        assert world.fake.cached[follower] == len(PREFIX)


@pytest.mark.parametrize("budget", [2048, 300, 64, 17])
@pytest.mark.parametrize("together", [True, False], ids=["together", "in turn"])
def test_of_32_requests_with_one_new_prefix_one_computes_it(budget: int, together: bool) -> None:
    prefix, count = list(range(1, 97)), 32
    world = SchedulingWorld(512, token_budget=budget)
    prompts = [[*prefix, 200 + n, 300, 301] for n in range(count)]
    ids = []
    for prompt in prompts:
        ids.append(world.add(prompt, max_tokens=1))
        world.steps(0 if together else 1)
    world.finish()
    needed = len(prefix) + 3 * count
    duplicated = (count - 1) * len(prefix)
    assert world.computed - needed <= 0.1 * duplicated
    assert world.computed == needed, "indeed none of it"
    assert [world.fake.answers[one] for one in ids] == [fakes.expected_answer(prompt, 1) for prompt in prompts]
    world.settled()


def test_without_holding_back_each_of_them_computes_it() -> None:
    """What the figure above is compared with."""
    prefix, count = list(range(1, 97)), 16
    world = SchedulingWorld(512, hold_back=False)
    for n in range(count):
        world.add([*prefix, 200 + n, 300, 301], max_tokens=1)
    world.finish()
    assert world.computed == count * (len(prefix) + 3)


def test_prefixes_of_prefixes_are_each_computed_once() -> None:
    world = SchedulingWorld(256)
    middle = [*PREFIX, *range(200, 216)]
    prompts = [[*PREFIX, 90], [*middle, 91], [*middle, 92], [*PREFIX, 93], [*middle, 94]]
    for prompt in prompts:
        world.add(prompt, max_tokens=1)
    world.finish()
    assert world.computed == len(middle) + len(prompts)


def test_held_ones_do_not_hold_up_others(scored: int) -> None:
    world = SchedulingWorld()
    slow_leader(world)
    followers = [world.add([*PREFIX, 70 + n], max_tokens=4) for n in range(5)]
    other = world.add(OTHER, max_tokens=1)
    less_urgent = world.add([*OTHER, 3], max_tokens=1, priority=7)
    world.steps()
    assert world.held == set(followers) and world.ended(other)
    world.steps()
    assert world.ended(less_urgent)
    assert world.fake.engine.load().held == len(followers)
    world.finish()
    world.settled()


def test_nobody_waits_for_a_less_urgent_leader(scored: int) -> None:
    """Found here: everybody of the leader's class and above passes it, and the urgent one would wait behind them."""
    world = SchedulingWorld()
    leader = slow_leader(world, priority=5)
    urgent = world.add([*PREFIX, 70, 71], max_tokens=4)
    equal = world.add([*PREFIX, 72, 73], max_tokens=4, priority=5)
    behind = world.add([*PREFIX, 74, 75], max_tokens=4, priority=9)
    world.steps()
    assert world.running == [leader, urgent] and world.held == {equal, behind}
    world.finish()
    world.settled()


def test_who_cannot_share_is_not_held(scored: int) -> None:
    world = SchedulingWorld()
    slow_leader(world)
    salted = world.add([*PREFIX, 70, 71], max_tokens=2, cache_salt="mine")
    scoring = world.add([*PREFIX, 72, 73], max_tokens=2, prompt_logprobs=0)
    short = world.add([*PREFIX[:3], 74], max_tokens=2)
    world.steps()
    assert world.held == set() and len(world.running) == 4
    world.finish()
    assert world.fake.cached[salted] == 0 and world.ended(scoring, short)


def test_without_a_cache_nobody_is_held(scored: int) -> None:
    world = SchedulingWorld(prefix_cache="off")
    slow_leader(world)
    world.add([*PREFIX, 70, 71], max_tokens=2)
    world.steps()
    assert world.held == set() and len(world.running) == 2


@pytest.mark.parametrize("step", range(12))
def test_leaders_that_end_one_after_another_leave_nobody_behind(step: int, scored: int) -> None:
    """A hold never deadlocks: whoever leads is cancelled, every few steps, until one request is left."""
    world = SchedulingWorld(step_s=0.001, ageing_s=float("inf"))
    ids = [world.add([*LEADER, n], max_tokens=2, prompt_logprobs=0 if n % 2 else None) for n in range(6)]
    world.steps(step)
    for _ in ids[1:]:
        if world.running:
            world.cancel(world.running[0])
        world.steps(step)
    world.finish()
    for n, one in enumerate(ids):
        wanted = fakes.expected_answer([*LEADER, n], 2)
        assert world.fake.answers[one] == wanted[: world.tokens(one)] and world.ended(one)
    assert any(world.tokens(one) == 2 for one in ids)
    world.settled()


def test_a_group_is_held_and_leads_like_any_other() -> None:
    world = SchedulingWorld(128)
    ids = [world.add([*PREFIX, 70 + n], max_tokens=3, n=2, seed=5) for n in range(4)]
    beams = world.add([*PREFIX, 80], max_tokens=3, beam_width=2)
    world.steps()
    assert world.running == ids[:1] and world.held == {*ids[1:], beams}
    world.finish()
    for n, one in enumerate(ids):
        assert world.fake.choices[one] == {i: fakes.expected_sample([*PREFIX, 70 + n], 3, 5 + i) for i in range(2)}
    assert world.ended(beams)
    world.settled()


def test_a_leaders_id_that_comes_again_is_another_leader() -> None:
    world = SchedulingWorld()
    with mock.patch("worker.step_budget.MAX_SCORED", 1):
        leader = slow_leader(world)
        follower = world.add([*PREFIX, 70, 71], max_tokens=2)
        world.steps()
        command = world.fake.command(leader, OTHER, 3)
        world.cancel(leader)
        world.fake.step()
        del world.fake.last[leader], world.fake.ends[leader, 0]
        world.fake.engine.execute([command])
        world.fake.answers[leader] = []
        world.finish()
    assert world.fake.answers[leader] == fakes.expected_answer(OTHER, 3)
    assert world.fake.answers[follower] == fakes.expected_answer([*PREFIX, 70, 71], 2)
    world.settled()


def test_nobody_waits_for_the_part_of_a_chunk_that_a_chunk_cache_never_finds() -> None:
    """100 equal requests once took 100 steps: each waited for the last part of the one before."""
    world = SchedulingWorld(num_blocks=512, prefix_cache="chunk")
    prompt = list(range(1, 40))  # four chunks of 8, and 7 more
    requests = [world.add(prompt, max_tokens=1) for _ in range(20)]
    world.steps()
    assert world.running in ([requests[0]], []) and world.held == set(requests[1:])
    world.steps()
    assert world.held == set(), "the four chunks are there, and more will not be"
    world.finish()
    assert world.computed == len(prompt) + 19 * 7


def test_a_chunk_cache_holds_until_whole_chunks_are_there() -> None:
    world = SchedulingWorld(prefix_cache="chunk")
    leader = slow_leader(world)
    follower = world.add([*PREFIX, 100, 101, 102, 103, 70, 71], max_tokens=4)
    while computed_by(world, leader) < len(PREFIX):
        world.steps()
        assert world.held == {follower}
    world.steps()
    assert world.held == set(), "the block after the second chunk is shared, too, but in no chunk"
    world.finish()
