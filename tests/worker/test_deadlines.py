"""Deadlines: who is told of, when, and once; and requests that end by them, whatever they are doing."""

from __future__ import annotations

from typing import Any

import fake_engine as fakes
import pytest
from fake_grammar import FakePort
from hypothesis import given
from hypothesis import strategies as st
from scheduling_world import SchedulingWorld

from cluster.core.constraint import Constraint
from cluster.core.errors import DeadlineExceeded
from cluster.core.request import FinishReason
from worker.deadlines import Deadlines
from worker.frame import EngineCommand, EngineMode

REGEX = Constraint.regex("a+")
PREFIX = list(range(1, 17))


def test_the_earliest_first_and_each_once() -> None:
    deadlines = Deadlines()
    for name, at in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("d", 9.0)):
        deadlines.set(name, at)
    assert deadlines.next() == 1.0
    assert deadlines.passed(0.9) == []
    assert deadlines.passed(2.0) == ["a", "b"]
    assert deadlines.passed(5.0) == ["c"]
    assert (deadlines.passed(5.0), deadlines.next()) == ([], 9.0)


def test_a_cleared_or_replaced_one_is_not_told_of() -> None:
    deadlines = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.set("b", 1.0)
    deadlines.clear("a")
    deadlines.clear("nobody")
    deadlines.set("b", 4.0)
    assert deadlines.next() == 4.0
    assert deadlines.passed(3.0) == []
    assert deadlines.passed(4.0) == ["b"]
    assert deadlines.next() is None


def test_memory_is_bounded_by_the_live_ones() -> None:
    deadlines = Deadlines()
    for n in range(10_000):
        deadlines.set(f"r{n}", 1e9 - n)
        if n >= 10:
            deadlines.clear(f"r{n - 10}")
    assert len(deadlines._heap) <= 2 * 11 + 65


@given(st.lists(st.tuples(st.sampled_from(["set", "clear", "pass"]), st.integers(0, 3), st.integers(0, 9))))
def test_as_a_table_of_times_would_do_it(script: list[tuple[str, int, int]]) -> None:
    deadlines, table, now = Deadlines(), dict[str, float](), 0.0
    for what, who, number in script:
        if what == "set":
            deadlines.set(str(who), now + number)
            table[str(who)] = now + number
        elif what == "clear":
            deadlines.clear(str(who))
            table.pop(str(who), None)
        else:
            now += number
            late = sorted((at, name) for name, at in table.items() if at <= now)
            assert deadlines.passed(now) == [name for _, name in late]
            table = {name: at for name, at in table.items() if at > now}
        assert deadlines.next() == min(table.values(), default=None)


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"beam_width": 2}], ids=["plain", "samples", "beams"])
@pytest.mark.parametrize("state", ["queued", "held", "prompt", "decoding", "preempted", "paused", "compiling"])
def test_a_late_request_ends_in_whatever_state_and_gives_everything_back(state: str, options: dict[str, Any]) -> None:
    if state == "compiling":
        options = {"constraint": REGEX} | ({"n": 3} if options else {})
    seats = {"queued": 3, "held": 8}.get(state, 8)
    world = SchedulingWorld(
        64, step_s=1.0, max_num_seqs=seats, token_budget=24 if state != "prompt" else 5, grammars=FakePort()
    )
    other = world.add([*PREFIX, 1], max_tokens=30, n=3 if state == "queued" else 1)
    if state != "held":
        world.steps(4)
    prompt = [*PREFIX, 70] if state == "held" else [*range(200, 216), 70]
    request = world.add(prompt, max_tokens=30, timeout_s=2.5 if state != "held" else 1.5, **options)
    world.steps(1 if state == "held" else 2)
    if state == "preempted":
        world.scheduler.preempt_one()
    if state == "paused":
        world.mode(EngineMode.PAUSE)
    held = request in world.held
    assert held == (state == "held") and (request in world.waiting) == (state in ("queued", "preempted"))
    steps = world.fake.runner.steps
    manager = world.fake.engine._manager
    world.steps()
    error = world.last(request).error
    assert isinstance(error, DeadlineExceeded)
    assert all(seq.request.request_id == other for seq in world.scheduler.sequences())
    assert all(name.split("/")[0] == other for name in manager._tables)
    assert world.fake.runner.steps == steps + (state != "paused"), "the others went on"
    assert request not in {name.split("/")[0] for name in world.step_tokens} or state == "paused"
    world.mode(EngineMode.RESUME)
    world.finish()
    load = world.fake.engine.load()
    assert (load.expired_requests, load.finished_requests) == (1, 1)
    world.settled()


def test_a_deadline_of_no_time_costs_no_step() -> None:
    world = SchedulingWorld(grammars=FakePort())
    plain = world.add([1, 2, 3], timeout_s=0)
    constrained = world.add([1, 2, 3], timeout_s=0.0, constraint=REGEX)
    world.fake.step()
    assert all(isinstance(world.last(one).error, DeadlineExceeded) for one in (plain, constrained))
    assert world.fake.runner.steps == 0
    world.settled()


def test_an_answer_that_is_complete_in_time_is_not_late() -> None:
    world = SchedulingWorld(step_s=1.0)
    request = world.add([1, 2, 3], max_tokens=3, timeout_s=3.5)
    world.steps(10)
    assert world.last(request).finish_reason is FinishReason.LENGTH
    assert world.fake.engine.load().expired_requests == 0
    world.settled()


def test_an_answer_that_is_complete_while_its_deadline_passes_is_an_answer() -> None:
    world = SchedulingWorld(step_s=0.0)
    world.run_s = 10.0
    request = world.add([1, 2, 3], max_tokens=1, timeout_s=5.0)
    world.steps(2)
    assert world.last(request).finish_reason is FinishReason.LENGTH
    world.settled()


def test_cancelled_and_late_at_once_is_told_once() -> None:
    world = SchedulingWorld(step_s=1.0)
    request = world.add([1, 2, 3], timeout_s=1.5)
    world.steps()
    world.cancel(request)
    world.steps(3)
    assert world.last(request).finish_reason is FinishReason.CANCELLED
    assert world.fake.engine.load().expired_requests == 0
    world.settled()


def test_an_id_that_comes_again_at_once_keeps_its_own_deadline() -> None:
    """Found here: the last delta of the first one, in the same frame, cleared the deadline of the second."""
    world = SchedulingWorld(step_s=1.0)
    command = world.fake.command("a", [1, 2, 3], 30, timeout_s=100.0)
    again = world.fake.command("a", [1, 2, 3], 30, timeout_s=2.5)
    world.fake.engine.execute([command])
    world.fake.engine.step()
    world.fake.engine.execute([EngineCommand(cancel="a"), again])
    frames = []
    for _ in range(4):
        world.clock.now += 1.0
        frames.append(world.fake.engine.step())
    lasts = [d for frame in frames for d in frame.deltas if d.last]
    assert lasts[0].finish_reason is FinishReason.CANCELLED
    assert isinstance(lasts[1].error, DeadlineExceeded) and len(lasts) == 2
    world.settled()


def test_an_id_without_a_deadline_has_none_left_from_before() -> None:
    world = SchedulingWorld(step_s=1.0)
    world.fake.engine.execute([world.fake.command("a", [1, 2, 3], 30, timeout_s=2.0)])
    world.fake.engine.step()
    world.fake.engine.execute([EngineCommand(cancel="a"), world.fake.command("a", [1, 2, 3], 5)])
    world.fake.answers["a"] = []
    lasts = []
    for _ in range(8):
        world.clock.now += 1.0
        lasts += [d for d in world.fake.engine.step().deltas if d.last]
    assert [d.finish_reason for d in lasts] == [FinishReason.CANCELLED, FinishReason.LENGTH]
    world.settled()


def test_an_engine_with_a_passed_deadline_is_not_idle() -> None:
    """Found here: a deadline that passed during the check of the books had to wait for its end."""
    world = SchedulingWorld(grammars=FakePort())
    world.mode(EngineMode.PAUSE)
    request = world.add([1, 2, 3], timeout_s=2.0)
    assert world.fake.engine.idle and world.fake.engine.next_deadline == world.clock.now + 2.0
    world.clock.now += 2.0
    assert not world.fake.engine.idle
    world.fake.step()
    assert isinstance(world.last(request).error, DeadlineExceeded)
    assert world.fake.engine.idle and world.fake.engine.next_deadline is None


def test_others_take_the_place_of_a_late_one_in_the_same_step() -> None:
    world = SchedulingWorld(step_s=1.0, max_num_seqs=1)
    late, next_one = world.add([1, 2, 3], 50, timeout_s=2.5), world.add([4, 5], 1)
    world.steps(3)
    assert isinstance(world.last(late).error, DeadlineExceeded)
    assert world.fake.answers[next_one] == fakes.expected_answer([4, 5], 1)
