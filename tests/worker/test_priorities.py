"""Priorities: strict across classes in queue, budget, seats and memory; within a class nothing changes."""

from __future__ import annotations

from typing import Any

import fake_engine as fakes
import pytest
from scheduling_world import SchedulingWorld

from worker.sequence import Sequence
from worker.step_budget import StepBudget


def prompt(base: int, length: int) -> list[int]:
    return list(range(base, base + length))


def test_the_queue_is_strictly_ordered_by_class_and_by_age_within_one() -> None:
    world = SchedulingWorld(max_num_seqs=1, hold_back=False)
    ids = [
        world.add(prompt(100 * n, 5), max_tokens=1, priority=p) for n, p in enumerate([3, -1, 0, 3, -1, 0, 2**31 - 1])
    ]
    world.finish()
    assert list(world.fake.last) == [ids[n] for n in (1, 4, 2, 5, 0, 3, 6)]


def test_a_hot_prefix_does_not_pass_a_more_urgent_request() -> None:
    world = SchedulingWorld(max_num_seqs=1)
    world.add(prompt(1, 12), max_tokens=1)
    world.steps()
    hot, cold = world.add([*prompt(1, 12), 99], max_tokens=1, priority=1), world.add(prompt(500, 30), max_tokens=1)
    world.finish()
    assert list(world.fake.last)[1:] == [cold, hot]


def test_waiting_for_long_does_not_make_anybody_more_urgent() -> None:
    """Ageing orders a class. Strict priorities may starve those below: that is what was asked for."""
    world = SchedulingWorld(max_num_seqs=1, step_s=1.0, ageing_s=2.0)
    patient = world.add(prompt(1, 5), max_tokens=1, priority=1)
    for n in range(20):
        world.add(prompt(100 + 10 * n, 5), max_tokens=1)
        world.steps()
    assert not world.ended(patient)
    world.finish()
    assert world.ended(patient)


def test_an_urgent_prompt_gets_the_budget_before_pieces_of_less_urgent_ones() -> None:
    world = SchedulingWorld(token_budget=8)
    slow = world.add(prompt(100, 60), max_tokens=1, priority=1)
    world.steps()
    urgent = world.add(prompt(500, 12), max_tokens=1)
    world.steps()
    assert world.step_tokens == {urgent: 8}
    equal = world.add(prompt(700, 4), max_tokens=1, priority=1)
    world.steps()
    assert world.step_tokens == {urgent: 4, slow: 4}
    world.steps(7)
    assert world.ended(slow, equal), "its equal had to wait for its turn"


def test_decoding_goes_on_beside_an_urgent_prompt() -> None:
    world = SchedulingWorld(token_budget=8)
    decoding = world.add([1, 2], max_tokens=10, priority=1)
    world.steps()
    urgent = world.add(prompt(500, 30), max_tokens=1)
    world.steps()
    assert world.step_tokens == {decoding: 1, urgent: 7}


def test_with_fewer_tokens_than_rows_the_urgent_rows_come_first() -> None:
    world = SchedulingWorld(token_budget=2)
    group = world.add([7], max_tokens=4, n=2, priority=1)
    world.steps()
    ids = [world.add([base], max_tokens=6, priority=p) for base, p in ((100, 2), (300, 0))]
    world.until(lambda: world.ended(group))
    world.steps(2)
    assert set(world.step_tokens) == set(ids)
    world.finish()
    assert world.ended(*ids)


def test_an_urgent_request_takes_the_seat_of_the_newest_least_urgent_one() -> None:
    world = SchedulingWorld(max_num_seqs=3)
    ids = [world.add([base, base + 1], max_tokens=9, priority=p) for base, p in ((100, 2), (200, 2), (300, 1))]
    world.steps()
    urgent = world.add([500, 501], max_tokens=2)
    world.steps()
    assert world.running == [ids[2], ids[0], urgent], "in admission order, the more urgent came in first"
    assert world.preemptions == 1
    world.finish()
    for base, one in zip((100, 200, 300), ids, strict=True):
        assert world.fake.answers[one] == fakes.expected_answer([base, base + 1], 9)
    world.settled()


def test_an_equal_never_gives_its_seat_or_its_memory() -> None:
    world = SchedulingWorld(8, max_num_seqs=2)
    ids = [world.add(prompt(100, 14), max_tokens=3), world.add(prompt(300, 6), max_tokens=3)]
    world.steps()
    world.add(prompt(500, 20), max_tokens=1)
    world.steps()
    assert world.running == ids and world.preemptions == 0


def test_an_urgent_request_takes_the_memory_of_less_urgent_ones_as_far_as_it_needs() -> None:
    world = SchedulingWorld(12)
    ids = [world.add(prompt(base, 13), max_tokens=3, priority=p) for base, p in ((100, 1), (200, 3), (300, 2))]
    world.steps()
    assert world.in_use() == 12
    urgent = world.add(prompt(500, 16), max_tokens=2)
    world.steps()
    assert world.running == [ids[0], ids[2], urgent] and world.preemptions == 1
    world.finish()
    for base, one in zip((100, 200, 300), ids, strict=True):
        assert world.fake.answers[one] == fakes.expected_answer(prompt(base, 13), 3)
    world.settled()


def test_nobody_is_preempted_in_vain_for_a_seat() -> None:
    world = SchedulingWorld(max_num_seqs=3)
    world.add([100, 101], max_tokens=9, n=2)
    less_urgent = world.add([200, 201], max_tokens=9, priority=1)
    world.steps(2)
    group = world.add([300, 301], max_tokens=9, n=2)
    world.steps()
    assert less_urgent in world.running and world.waiting == {group} and world.preemptions == 0


def test_nobody_is_preempted_in_vain_for_blocks_that_two_of_them_share() -> None:
    """Found here: a block with two less urgent holders was counted as two blocks to gain."""
    world = SchedulingWorld(24)
    shared = prompt(1, 40)
    world.add(prompt(500, 40), max_tokens=4)  # 10 blocks, as urgent
    world.steps()
    twins = [world.add([*shared, 70 + n], max_tokens=4, priority=1) for n in range(2)]
    world.steps(2)
    assert world.in_use() == 10 + 1 + 12
    large = world.add(prompt(600, 56), max_tokens=1)  # 14 blocks: 11 stay, so 13 can be had
    world.steps()
    assert world.waiting == {large} and set(twins) <= set(world.running) and world.preemptions == 0
    world.finish()
    world.settled()


def test_nobody_is_preempted_in_vain_for_blocks_that_one_who_stays_holds_too() -> None:
    """Found here: blocks that an equal of the urgent one keeps in use were counted as blocks to gain."""
    world = SchedulingWorld(24)
    shared = prompt(1, 40)
    world.add([*shared, 70], max_tokens=8)
    world.steps()
    twin = world.add([*shared, 71], max_tokens=8, priority=1)
    world.steps()
    large = world.add(prompt(600, 60), max_tokens=1)  # 15 blocks of the 13 that do not stay
    world.steps()
    assert world.waiting == {large} and twin in world.running and world.preemptions == 0
    world.finish()
    world.settled()


def test_nobody_is_preempted_in_vain_where_the_watermark_keeps_the_urgent_one_out() -> None:
    """Found here: the watermark was not counted."""
    world = SchedulingWorld(20, watermark=0.2)
    world.add(prompt(500, 15), max_tokens=2)  # 4 blocks
    less_urgent = world.add(prompt(100, 15), max_tokens=20, priority=1)
    world.steps()
    large = world.add(prompt(600, 52), max_tokens=1)  # 13 blocks of 16, but 4 shall stay free
    world.steps()
    assert world.waiting == {large} and less_urgent in world.running and world.preemptions == 0
    world.finish()
    world.settled()


@pytest.mark.parametrize("length", [33, 1])
def test_nobody_is_preempted_in_vain_for_a_group_whose_rows_do_not_fit(length: int) -> None:
    """Found here: of a group only the prompt was counted."""
    world = SchedulingWorld(22)
    world.add(prompt(500, 4 * (22 - 3) - 4 * (length // 4)), max_tokens=4)
    less_urgent = world.add([100], max_tokens=20, priority=1)
    world.steps()
    group = world.add(prompt(1, length), max_tokens=2, n=4)
    world.steps()
    assert world.waiting == {group} and less_urgent in world.running and world.preemptions == 0
    world.finish()
    assert world.last(group).error is None
    world.settled()


def test_blocks_that_the_urgent_one_shares_with_who_stays_are_not_needed_twice() -> None:
    world = SchedulingWorld(24)
    shared = prompt(1, 40)
    world.add([*shared, 70], max_tokens=8)  # 11 blocks
    less_urgent = world.add(prompt(500, 48), max_tokens=3, priority=1)  # 12
    world.steps()
    urgent = world.add([*shared, *prompt(800, 20)], max_tokens=1)  # 15, of which 10 are there
    world.steps()
    assert world.ended(urgent) and world.waiting == {less_urgent}
    world.finish()
    world.settled()


def test_a_group_is_preempted_as_a_whole_for_one_seat() -> None:
    world = SchedulingWorld(max_num_seqs=4)
    plain = world.add([100, 101], max_tokens=9, priority=1)
    group = world.add([200, 201, 202], max_tokens=9, priority=2, n=3, seed=4)
    world.steps(3)
    urgent = world.add([300, 301], max_tokens=2)
    world.steps()
    assert world.running == [plain, urgent] and world.waiting == {group} and world.preemptions == 1
    world.finish()
    assert world.fake.choices[group] == {i: fakes.expected_sample([200, 201, 202], 9, 4 + i) for i in range(3)}
    world.settled()


def test_who_cannot_start_blocks_those_below_but_not_those_above() -> None:
    """What passes it would take the memory it waits for."""
    world = SchedulingWorld(12)
    running = world.add(prompt(100, 25), max_tokens=6)
    world.steps()
    large = world.add(prompt(300, 24), max_tokens=1, priority=1)
    equal, below = (world.add([400 + p], max_tokens=1, priority=p) for p in (1, 2))
    world.steps()
    assert world.waiting == {large, equal, below}
    above = world.add([500], max_tokens=1)
    world.steps()
    assert world.ended(above) and world.waiting == {large, equal, below} and world.running == [running]
    world.finish()
    assert list(world.fake.last)[2:] == [large, equal, below]


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"beam_width": 2}], ids=["plain", "samples", "beams"])
def test_memory_for_the_next_token_comes_from_the_least_urgent_even_if_it_is_the_oldest(
    options: dict[str, Any],
) -> None:
    world = SchedulingWorld(12)
    length = 16 if options else 30
    oldest = world.add(prompt(100, 8), max_tokens=length, priority=1, **options)
    world.steps()
    urgent = world.add(prompt(200, 8), max_tokens=40)
    newest = world.add(prompt(300, 3), max_tokens=2)
    world.until(lambda: world.preemptions > 0)
    assert world.running == [urgent] and world.waiting == {oldest} and world.ended(newest)
    world.finish()
    if not options:
        assert world.fake.answers[oldest] == fakes.expected_answer(prompt(100, 8), length)
    assert world.fake.answers[urgent] == fakes.expected_answer(prompt(200, 8), 40)
    world.settled()


def test_who_goes_and_comes_back_in_one_step_is_scheduled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefilling victim that comes in again at once.

    It arrived before the other victim, but came in after it, because that one had a cached prefix: so it goes first,
    which is not enough, and then there is room for it again.
    """
    hot = prompt(1, 12)
    world = SchedulingWorld(26, token_budget=86)
    world.add(hot, max_tokens=1)
    world.finish()
    early = world.add(prompt(700, 8), max_tokens=4, priority=5)
    late = world.add([*hot, 90, 91, 92, 93], max_tokens=4, priority=5)
    big = world.add(prompt(100, 80), max_tokens=1)
    world.steps()
    assert world.step_tokens == {big: 80, late: 4, early: 2}

    take, taken = StepBudget.take, []

    def noted(step: StepBudget, seq: Sequence) -> None:
        assert seq.seq_id not in step.tokens, "scheduled twice"
        taken.append(seq.seq_id)
        take(step, seq)

    monkeypatch.setattr(StepBudget, "take", noted)
    urgent = world.add([*prompt(100, 80), *prompt(400, 8)], max_tokens=1)
    world.steps()
    assert taken == [urgent, early] and world.preemptions == 2 and world.waiting == {late}
    world.finish()
    assert world.fake.answers[early] == fakes.expected_answer(prompt(700, 8), 4)
    world.settled()
