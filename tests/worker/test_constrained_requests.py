"""Requests with a constraint in the engine, without a grammar library: waiting, ends, failures, groups, waking."""

from __future__ import annotations

import threading
import time
from typing import Any

import fake_engine as fakes
import pytest
from fake_grammar import FakePort
from recording_sink import RecordingSink, tokens_of

from cluster.core.constraint import Constraint
from cluster.core.errors import ConfigError, InvalidRequest, KvrayError, Overloaded, RequestTooLong
from cluster.core.request import FinishReason
from worker.engine_thread import ThreadEnginePort
from worker.scheduler import Scheduler

PROMPT = list(range(100, 113))
OTHER = list(range(300, 309))
A, B = Constraint.regex("a+"), Constraint.regex("b+")


class World:
    def __init__(self, **options: Any) -> None:
        self.port = FakePort()
        self.fake = fakes.make_fake_engine(grammars=self.port, **options)

    def add(self, constraint: Constraint = A, prompt: list[int] = PROMPT, **options: Any) -> str:
        return self.fake.add(prompt, constraint=constraint, **options)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.fake.step()

    @property
    def scheduler(self) -> Scheduler:
        return self.fake.engine._scheduler

    def settled(self) -> None:
        load = self.fake.engine.load()
        assert (load.in_use_blocks, load.waiting, load.running, load.uncached_tokens) == (0, 0, 0, {})
        assert not self.fake.engine.has_work and self.fake.engine.idle


@pytest.fixture
def world() -> World:
    return World()


def test_others_go_on_while_a_grammar_is_compiled(world: World) -> None:
    held = world.add()
    free = world.fake.add(OTHER, max_tokens=5)
    assert world.fake.engine.load().waiting == 2
    world.steps(5)
    assert world.fake.answers == {held: [], free: fakes.expected_answer(OTHER, 5)}
    load = world.fake.engine.load()
    assert (load.waiting, load.running, load.uncached_tokens) == (1, 0, {"router": len(PROMPT)})
    assert world.fake.engine.has_work and world.fake.engine.idle
    world.port.compiled(A, length=4)
    assert not world.fake.engine.idle
    world.fake.finish()
    assert world.fake.answers[held] == fakes.expected_answer(PROMPT, 4)
    assert world.fake.last[held].finish_reason is FinishReason.STOP
    world.settled()


def test_a_grammar_that_is_there_costs_no_step(world: World) -> None:
    world.port.compiled(A, length=3)
    request = world.add()
    world.steps(1)
    assert world.fake.answers[request] == fakes.expected_answer(PROMPT, 1)
    world.fake.finish()


def test_requests_go_on_in_the_order_of_their_grammars(world: World) -> None:
    first, second, third = world.add(A), world.add(B), world.add(A)
    world.port.compiled(B, length=2)
    world.steps(2)
    assert list(world.fake.last) == [second]
    world.port.compiled(A, length=2)
    world.fake.finish()
    assert list(world.fake.last) == [second, first, third]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("regex", "regex is refused", at="character 2"), InvalidRequest),
        (ConfigError("no vocabulary"), ConfigError),
        (RuntimeError("a bug"), KvrayError),
        (KeyboardInterrupt("a panic of the library"), KvrayError),
    ],
    ids=str,
)
def test_a_grammar_that_fails_ends_its_requests_only(world: World, error: BaseException, kind: type) -> None:
    failing = [world.add(), world.add()]
    free = world.fake.add(OTHER, max_tokens=3)
    world.port.failed(A, error)
    failing.append(world.add())
    world.fake.finish()
    told = [world.fake.last[request].error for request in failing]
    assert [type(one) for one in told] == [kind] * 3
    assert len({id(one) for one in told}) == 3, "whoever adds to one changes no other"
    if isinstance(error, InvalidRequest):
        assert [one.details for one in told if one is not None] == [error.details] * 3
    assert world.fake.answers[free] == fakes.expected_answer(OTHER, 3)
    world.settled()


def test_cancelled_while_its_grammar_is_compiled(world: World) -> None:
    gone, stays = world.add(), world.add()
    world.fake.cancel(gone)
    world.steps(1)
    assert world.fake.last[gone].finish_reason is FinishReason.CANCELLED
    assert not world.port.pending[A].cancelled()
    world.port.compiled(A, length=2)
    world.fake.finish()
    assert list(world.fake.last) == [gone, stays]
    world.settled()


def test_what_is_refused_anyway_is_not_compiled() -> None:
    world = World(num_blocks=8, max_queue=1)
    too_long = world.add(prompt=list(range(1, 40)))
    waits = world.add()
    one_too_many = world.add(B)
    world.steps(1)
    assert isinstance(world.fake.last[too_long].error, RequestTooLong)
    assert isinstance(world.fake.last[one_too_many].error, Overloaded)
    assert list(world.port.pending) == [A]
    world.port.compiled(A, length=1)
    world.fake.finish()
    assert world.fake.last[waits].finish_reason is FinishReason.STOP


def test_the_same_id_twice_is_refused(world: World) -> None:
    request = world.add()
    world.fake.engine.execute([world.fake.command(request, PROMPT, constraint=A)])
    (delta,) = world.fake.engine.step().deltas
    assert isinstance(delta.error, InvalidRequest) and delta.error.field == "request_id"


def test_an_engine_without_structured_output_says_so() -> None:
    fake = fakes.make_fake_engine()
    request = fake.add(PROMPT, constraint=A)
    fake.finish()
    error = fake.last[request].error
    assert isinstance(error, InvalidRequest) and error.field == "regex"


def test_every_token_moves_the_grammar_and_its_end_is_the_answers(world: World) -> None:
    grammar = world.port.compiled(A, length=6)
    finished, bounded, stopped = (
        world.add(max_tokens=20),
        world.add(max_tokens=3),
        world.add(stop_token_ids=(fakes.expected_answer(PROMPT, 2)[1],)),
    )
    both = world.add(max_tokens=6)
    world.fake.finish()
    for request, count, reason in (
        (finished, 6, FinishReason.STOP),
        (bounded, 3, FinishReason.LENGTH),
        (stopped, 2, FinishReason.STOP),
        (both, 6, FinishReason.STOP),
    ):
        assert world.fake.answers[request] == fakes.expected_answer(PROMPT, count)
        assert world.fake.last[request].finish_reason is reason
    assert [len(progress.tokens) for progress in grammar.started] == [6, 3, 2, 6]
    world.settled()


def test_a_token_that_the_grammar_refuses_ends_its_request_only(world: World) -> None:
    wanted = fakes.expected_answer(PROMPT, 9)
    world.port.compiled(A, refused=wanted[3:4])
    request = world.add(max_tokens=9)
    free = world.fake.add(OTHER, max_tokens=9)
    world.fake.finish()
    assert world.fake.answers[request] == wanted[:3]
    assert world.fake.last[request].error is not None
    assert world.fake.answers[free] == fakes.expected_answer(OTHER, 9)
    world.settled()


@pytest.mark.parametrize("step", range(1, 9))
def test_a_preempted_request_keeps_its_place_in_the_grammar(world: World, step: int) -> None:
    grammar = world.port.compiled(A, length=7)
    request = world.add()
    group = world.add(n=2, seed=1)
    world.steps(step)
    while world.scheduler.preempt_one():
        pass
    world.fake.finish()
    assert world.fake.answers[request] == fakes.expected_answer(PROMPT, 7)
    assert world.fake.choices[group] == {i: fakes.expected_sample(PROMPT, 7, 1 + i) for i in range(2)}
    made = [fakes.expected_answer(PROMPT, 7), *(fakes.expected_sample(PROMPT, 7, 1 + i) for i in range(2))]
    assert sorted(p.tokens for p in grammar.started if p.tokens) == sorted(made)
    world.settled()


@pytest.mark.parametrize("options", [{"n": 3}, {"n": 2, "best_of": 4}], ids=str)
@pytest.mark.parametrize("prompt", [PROMPT, [7]], ids=len)
def test_every_sample_has_a_grammar_of_its_own(world: World, prompt: list[int], options: dict[str, Any]) -> None:
    grammar = world.port.compiled(A, length=5)
    request = world.add(prompt=prompt, seed=3, max_tokens=20, **options)
    world.fake.finish()
    rows = options.get("best_of", options["n"])
    made = [fakes.expected_sample(prompt, 5, 3 + i) for i in range(rows)]
    assert sorted(p.tokens for p in grammar.started if p.tokens) == sorted(made)
    assert all(tokens in made for tokens in world.fake.choices[request].values())
    assert len(world.fake.choices[request]) == options["n"]
    world.settled()


@pytest.mark.parametrize("row", range(3))
def test_a_sample_that_fails_ends_all_samples_of_its_request(world: World, row: int) -> None:
    """Also when other rows of it are still to be booked in the same step."""
    bad = fakes.expected_sample(PROMPT, 4, 5 + row)[3]
    world.port.compiled(A, refused=[bad])
    request = world.add(n=3, seed=5, max_tokens=9)
    free = world.fake.add(OTHER, max_tokens=9)
    world.fake.finish()
    assert world.fake.last[request].error is not None
    assert world.fake.answers[free] == fakes.expected_answer(OTHER, 9)
    world.settled()


def test_masks_are_prepared_once_a_step_for_those_that_go_on() -> None:
    world = World(token_budget=8)
    short, long = world.port.compiled(A, length=2), world.port.compiled(B, length=3)
    world.add(A, prompt=OTHER[:3])
    world.add(B, prompt=PROMPT)  # its prompt takes two steps
    world.fake.finish()
    (first,), (second,) = short.started, long.started
    assert world.port.prepared == [[first], [second], [second], [second]]


def test_closing_and_warming_up_reach_the_port(world: World) -> None:
    world.fake.engine.warm_up()
    world.fake.engine.close()
    assert (world.port.warm, world.port.closed) == (1, 1)
    without = fakes.make_fake_engine()
    without.engine.warm_up()
    without.engine.close()


def test_an_idle_engine_sleeps_until_the_grammar_is_there() -> None:
    """No frame while it is compiled, and the answer as soon as it is there."""
    world = World()
    port, sink = ThreadEnginePort(lambda: (world.fake.engine, world.fake.runner.facts)), RecordingSink()
    port.start(sink)
    sink.next_frame()
    port.send(world.fake.command("a", PROMPT, constraint=A))
    assert world.port.submitted.wait(30)
    sink.next_frame()
    time.sleep(0.05)
    assert sink.frames.empty(), "the loop spins"
    threading.Thread(target=lambda: world.port.compiled(A, length=5)).start()
    assert tokens_of(sink.until_last("a")["a"]) == fakes.expected_answer(PROMPT, 5)
    port.close()
    assert world.port.closed == 1
