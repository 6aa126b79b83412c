"""The door: how much may wait, what a refusal says, and what is kept free for those who run."""

from __future__ import annotations

import fake_engine as fakes
import pytest
from fake_grammar import FakePort
from scheduling_world import SchedulingWorld

from cluster.core.constraint import Constraint
from cluster.core.errors import InvalidRequest, Overloaded
from worker.frame import EngineMode

REGEX = Constraint.regex("a+")


def prompt(base: int, length: int) -> list[int]:
    return list(range(base, base + length))


def refusal(world: SchedulingWorld, request: str) -> Overloaded:
    world.fake.step()
    error = world.last(request).error
    assert isinstance(error, Overloaded)
    return error


def test_so_many_requests_may_wait() -> None:
    world = SchedulingWorld(max_num_seqs=1, max_queue=2)
    running = world.add([1], max_tokens=9)
    world.steps()
    queued = [world.add([2], max_tokens=1), world.add([3], max_tokens=1)]
    assert "2 requests" in refusal(world, world.add([4])).message
    world.finish()
    assert all(world.last(one).error is None for one in (running, *queued))
    world.settled()


def test_so_many_tokens_may_wait() -> None:
    world = SchedulingWorld(max_num_seqs=1, max_queue_tokens=20)
    world.add([1], max_tokens=9)
    world.steps()
    queued = [world.add(prompt(100, 12), max_tokens=1), world.add(prompt(200, 8), max_tokens=1)]
    assert "20 tokens" in refusal(world, world.add([4])).message
    assert world.queue.num_tokens == 20
    world.finish()
    assert all(world.last(one).error is None for one in queued)
    world.settled()


def test_one_that_is_longer_than_the_bound_is_taken_when_nothing_waits() -> None:
    world = SchedulingWorld(max_num_seqs=1, max_queue_tokens=20)
    world.add([1], max_tokens=5)
    world.steps()
    long = world.add(prompt(100, 60), max_tokens=1)
    refusal(world, world.add([4]))
    world.cancel(long)
    short = world.add([5], max_tokens=1)
    refusal(world, world.add(prompt(100, 60)))
    world.finish()
    assert world.last(short).error is None
    world.settled()


def test_the_hint_is_how_long_the_waiting_prompts_will_take() -> None:
    world = SchedulingWorld(256, max_num_seqs=1, max_queue=1)
    world.run_s = 1.0
    world.add(prompt(1, 100), max_tokens=1)
    world.add(prompt(500, 3), max_tokens=1)
    assert refusal(world, world.add([4])).retry_after_s == 1.0, "nothing was measured yet"
    world.finish()
    assert world.fake.engine.load().prefill_tokens_per_s == pytest.approx(100.0)
    world.add([7], max_tokens=50)
    world.steps()
    long = world.add(prompt(1, 1), max_tokens=1)
    assert refusal(world, world.add([4])).retry_after_s == 1.0, "not less than a second"
    world.cancel(long)
    world.add(prompt(200, 450), max_tokens=1)
    assert refusal(world, world.add([4])).retry_after_s == pytest.approx(4.5)


def test_the_hint_is_never_more_than_a_minute() -> None:
    world = SchedulingWorld(256, max_num_seqs=1, max_queue=1)
    world.run_s = 50.0
    world.add(prompt(1, 100), max_tokens=1)
    world.finish()
    world.add([7], max_tokens=50)
    world.steps()
    world.add(prompt(200, 450), max_tokens=1)
    assert refusal(world, world.add([4])).retry_after_s == 60.0


def test_a_refused_request_leaves_no_trace() -> None:
    world = SchedulingWorld(max_num_seqs=1, max_queue=1)
    world.add([1], max_tokens=9)
    world.steps()
    world.add([2], max_tokens=1)
    before = (len(world.scheduler._live), len(world.queue), world.queue.num_tokens, world.fake.engine.next_deadline)
    for _ in range(5):
        refusal(world, world.add([4], timeout_s=1.0, n=1))
    after = (len(world.scheduler._live), len(world.queue), world.queue.num_tokens, world.fake.engine.next_deadline)
    assert before == after and world.fake.engine.load().refused_requests == 5


def test_preempted_ones_return_to_a_full_queue_and_their_answers_count_while_they_wait() -> None:
    world = SchedulingWorld(max_num_seqs=2, max_queue=1, max_queue_tokens=10)
    ids = [world.add([base, base + 1], max_tokens=9) for base in (100, 200)]
    assert isinstance(refusal(world, ids[1]), Overloaded)
    ids[1] = world.add([200, 201], max_tokens=9)
    world.steps(3)
    queued = world.add([5], max_tokens=1)
    assert world.scheduler.preempt_one() and world.scheduler.preempt_one()
    assert world.queue.num_tokens == 1 + sum(2 + world.tokens(one) for one in ids)
    refusal(world, world.add([6]))
    world.finish()
    assert [world.tokens(one) for one in ids] == [9, 9] and world.tokens(queued) == 1
    world.settled()


def test_requests_that_wait_for_a_grammar_count() -> None:
    world = SchedulingWorld(max_queue=3, max_queue_tokens=20, grammars=FakePort())
    world.add(prompt(1, 12), constraint=REGEX)
    refusal(world, world.add(prompt(100, 9)))
    refusal(world, world.add(prompt(100, 9), constraint=REGEX))
    fits = world.add(prompt(100, 8), max_tokens=1)
    world.steps()
    assert world.last(fits).error is None


@pytest.mark.parametrize("reason", ["full", "draining"])
def test_a_request_that_was_let_in_is_not_refused_when_its_grammar_comes(reason: str) -> None:
    """Found here: the door was asked again, and the queue may be full of preempted ones, or the engine draining."""
    port = FakePort()
    world = SchedulingWorld(max_num_seqs=1, max_queue=1, grammars=port)
    running = world.add([1, 2], max_tokens=5)
    world.steps()
    parked = world.add([3, 4], max_tokens=2, constraint=REGEX)
    world.steps()
    if reason == "full":
        world.scheduler.preempt_one()
    else:
        world.mode(EngineMode.DRAIN)
    port.compiled(REGEX)
    world.finish()
    assert world.last(parked).error is None
    assert world.fake.answers[parked] == fakes.expected_answer([3, 4], 2)
    assert world.ended(running)
    world.settled()


def test_the_id_of_a_request_that_waits_for_its_grammar_is_taken() -> None:
    """Found here: the second was let in, and the first ended with its error once the grammar came."""
    port = FakePort()
    world = SchedulingWorld(grammars=port)
    parked = world.add([3, 4], max_tokens=2, constraint=REGEX, timeout_s=50.0)
    world.fake.engine.execute([world.fake.command(parked, [3, 4], 2)])
    deltas = world.fake.engine.step().deltas
    assert [type(d.error) for d in deltas] == [InvalidRequest]
    assert world.fake.engine.next_deadline is not None, "its refusal is not the end of the first"
    port.compiled(REGEX)
    world.finish()
    assert world.fake.answers[parked] == fakes.expected_answer([3, 4], 2)
    world.settled()


def test_the_watermark_keeps_newcomers_out_while_others_run() -> None:
    world = SchedulingWorld(20, watermark=0.2)
    first = world.add(prompt(1, 40), max_tokens=5)
    late = world.add(prompt(100, 28), max_tokens=1)
    world.steps()
    assert world.running == [first] and world.waiting == {late}, "3 of 20 blocks would be left, not 4"
    small = world.add(prompt(200, 3), max_tokens=1, priority=-1)
    world.steps()
    assert world.ended(small)
    world.finish()
    assert world.ended(first, late)
    world.settled()


def test_the_watermark_is_no_bound_for_who_is_alone() -> None:
    world = SchedulingWorld(20, watermark=0.9)
    ids = [world.add(prompt(100 * n, 70), max_tokens=10) for n in (1, 2)]
    world.finish()
    assert [world.tokens(one) for one in ids] == [10, 10]
    world.settled()
