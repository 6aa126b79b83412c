"""The scheduling scenarios of engine.md 4, in virtual time: order after preemption, starvation, aborts, groups."""

from __future__ import annotations

from typing import Any
from unittest import mock

import fake_engine as fakes
import pytest
from fake_grammar import FakePort
from scheduling_world import SchedulingWorld

from cluster.core.constraint import Constraint
from cluster.core.request import FinishReason
from worker.beam_search import BeamParams
from worker.frame import EngineMode
from worker.scheduling.preemption import Preemption
from worker.sequence import Sequence
from worker.step_budget import StepBudget

HOT = list(range(1, 13))
COLD = list(range(500, 513))
A, B = list(range(1, 9)), list(range(50, 58))
REGEX = Constraint.regex("a+")


def test_preempted_resumes_before_equals_that_never_started() -> None:
    """engine.md 4.14: what would fit at once waits behind what was preempted."""
    world = SchedulingWorld(8)
    older, victim = world.add(A, max_tokens=18), world.add(B, max_tokens=18)
    world.until(lambda: world.preemptions > 0)
    before = world.tokens(victim)
    late = world.add([900, 901], max_tokens=1)
    while world.tokens(victim) == before:
        assert world.tokens(late) == 0, "it passed the preempted one"
        world.steps()
    world.finish()
    assert world.ended(older, victim, late)
    assert world.fake.answers[victim] == fakes.expected_answer(B, 18)
    world.settled()


def test_several_preempted_ones_come_back_in_the_order_of_their_arrival() -> None:
    world = SchedulingWorld(max_num_seqs=3)
    ids = [world.add([base, base + 1, base + 2], max_tokens=9) for base in (100, 200, 300)]
    world.steps()
    late = world.add([400, 401], max_tokens=1)
    while world.scheduler.preempt_one():
        pass
    assert world.waiting == {*ids, late}
    world.steps()
    assert world.running == ids
    world.finish()


def test_a_victim_that_is_in_the_step_gives_its_budget_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """engine.md 4.14: the first row of the step is preempted for the second; a prompt gets what it had taken."""
    scheduled: list[dict[str, int]] = []
    preempt = Preemption._preempt

    def noted(self: Preemption, seq: Sequence, step: StepBudget) -> None:
        scheduled.append(dict(step.tokens))
        preempt(self, seq, step)

    monkeypatch.setattr(Preemption, "_preempt", noted)
    world = SchedulingWorld(12, token_budget=3)
    victim = world.add(A, max_tokens=20, priority=5)
    world.steps(5)
    urgent = world.add(B, max_tokens=20)
    world.steps(4)
    prompt = world.add(list(range(600, 616)), max_tokens=1)
    world.until(lambda: world.preemptions > 0)
    assert scheduled == [{victim: 1}], "it had its place in the step already"
    assert world.step_tokens == {urgent: 1, prompt: 2}
    world.finish()
    assert world.fake.answers[victim] == fakes.expected_answer(A, 20)
    world.settled()


def hot_rounds(world: SchedulingWorld, cold: str, rounds: int) -> int | None:
    """Two hot requests arrive for each that ends. In which round the cold one was answered."""
    for number in range(rounds):
        if world.ended(cold):
            return number
        for tail in range(2):
            world.add([*HOT, 100 + number, tail], max_tokens=1)
        world.steps()
    return None


@pytest.mark.parametrize(("ageing_s", "rounds"), [(2.0, 22), (0.5, 7), (0.0, 2)])
def test_one_cold_request_among_hot_ones_waits_no_longer_than_the_bound(ageing_s: float, rounds: int) -> None:
    """engine.md 4.15: longest prefix first must not starve what nobody has cached."""
    world = SchedulingWorld(max_num_seqs=1, step_s=0.1, ageing_s=ageing_s)
    world.add(HOT, max_tokens=1)
    world.steps()
    world.add([*HOT, 99], max_tokens=1)
    cold = world.add(COLD, max_tokens=1)
    answered = hot_rounds(world, cold, 100)
    assert answered is not None and answered <= rounds
    assert ageing_s < 2 or answered > 18, "until then the hot ones went first"


def test_without_the_bound_the_cold_request_starves() -> None:
    """engine.md 4.15: what the bound is there for."""
    world = SchedulingWorld(max_num_seqs=1, step_s=0.1, ageing_s=float("inf"))
    world.add(HOT, max_tokens=1)
    world.steps()
    world.add([*HOT, 99], max_tokens=1)
    cold = world.add(COLD, max_tokens=1)
    assert hot_rounds(world, cold, 100) is None
    world.finish()
    assert world.fake.answers[cold] == fakes.expected_answer(COLD, 1)


def test_in_the_order_of_arrival_nobody_is_passed() -> None:
    world = SchedulingWorld(max_num_seqs=1, scheduling="fcfs", ageing_s=float("inf"))
    world.add(HOT, max_tokens=1)
    world.steps()
    ids = [world.add(prompt, max_tokens=1) for prompt in ([*HOT, 98], COLD, [*HOT, 99], [*COLD, 1])]
    world.finish()
    assert list(world.fake.last)[1:] == ids


def test_a_prompt_that_takes_every_budget_holds_up_neither_decoding_nor_its_followers_for_ever() -> None:
    """engine.md 4.15: the token-budget hog."""
    world = SchedulingWorld(token_budget=8)
    decoding = world.add([900, 901], max_tokens=40)
    world.steps()
    hog = world.add(list(range(100, 200)), max_tokens=1)
    world.steps()
    short = world.add([700, 701], max_tokens=1)
    for _ in range(15):
        before = world.tokens(decoding)
        world.steps()
        assert world.tokens(decoding) == before + 1
        if world.ended(short):
            break
    assert world.ended(hog, short), "100 tokens at 7 a step, and the short one in the rest of the last"


def test_a_request_whose_grammar_came_late_is_not_passed_for_ever() -> None:
    """engine.md 4.15: parked grammar requests must be promoted."""
    port = FakePort()
    world = SchedulingWorld(max_num_seqs=1, step_s=0.1, grammars=port)
    world.add(HOT, max_tokens=1)
    world.steps()
    world.add([*HOT, 99], max_tokens=1)
    parked = world.add(COLD, max_tokens=1, constraint=REGEX)
    assert hot_rounds(world, parked, 5) is None
    port.compiled(REGEX)
    answered = hot_rounds(world, parked, 100)
    assert answered is not None and answered <= 22


STATES = [
    "queued",
    "held",
    "mid-piece",
    "decoding",
    "samples: prompt",
    "samples: decoding",
    "beams",
    "preempted",
    "preempted beams",
    "paused: queued",
    "paused: running",
    "finished",
    "compiling",
]
ROWS: dict[str, dict[str, int]] = {"samples": {"n": 3, "seed": 1}, "beams": {"beam_width": 3}}


def in_state(state: str) -> tuple[SchedulingWorld, str]:
    """A world with one other request, and one in that state."""
    seats, budget = 1 if "queued" in state else 8, 32 if state == "held" else 8
    world = SchedulingWorld(32, token_budget=budget, max_num_seqs=seats, grammars=FakePort())
    rows: dict[str, Any] = next((rows for name, rows in ROWS.items() if name in state), {})
    if state == "compiling":
        rows = {"constraint": REGEX}
    if state == "held":
        world.add([*HOT, 1, 2, 3, 4, 5, 6, 7], max_tokens=20)
    else:
        world.add(B, max_tokens=20)
    if state != "held" and "queued" not in state:
        world.steps()
    request = world.add([*HOT, 77], max_tokens=12, **rows)
    count = {"mid-piece": 1, "samples: prompt": 1, "queued": 1, "held": 1, "paused: queued": 1}.get(state, 6)
    world.steps(count)
    if state.startswith("preempted"):
        world.scheduler.preempt_one()
    if state.startswith("paused"):
        world.mode(EngineMode.PAUSE)
        world.steps()
    if state == "finished":
        world.finish()
    return world, request


@pytest.mark.parametrize("state", STATES)
def test_an_abort_gives_the_blocks_back_within_one_step(state: str) -> None:
    """engine.md 4.23: in every state, once or twice, and the pool is at its start afterwards."""
    world, request = in_state(state)
    is_running = request in world.running
    assert is_running == (state in ("mid-piece", "decoding", "paused: running") or state.startswith(("sam", "beam")))
    assert (request in world.held) == (state == "held")
    assert (request in world.waiting) == ("queued" in state or state.startswith("preempted"))
    if "decoding" in state:
        assert world.tokens(request) > 1
    if state in ("mid-piece", "samples: prompt"):
        assert 0 < world.scheduler.running[-1].num_computed < len(HOT)
    manager = world.fake.engine._manager
    others = {"r0"} if state != "finished" else set()
    world.cancel(request)
    world.cancel(request)
    world.steps()
    assert set(manager._tables) <= others and {seq.seq_id for seq in world.scheduler.sequences()} <= others
    if state == "finished":
        assert world.last(request).finish_reason is FinishReason.LENGTH
    else:
        assert world.last(request).finish_reason is FinishReason.CANCELLED
    world.cancel(request)
    world.mode(EngineMode.RESUME)
    again = world.add([*HOT, 77], max_tokens=12)
    world.finish()
    assert world.fake.answers[again] == fakes.expected_answer([*HOT, 77], 12)
    assert sum(d.request_id == request and d.last for f in world.fake.frames for d in f.deltas) == 1
    world.settled()


def test_a_held_one_whose_leader_is_aborted_computes_for_itself() -> None:
    world, request = in_state("held")
    world.cancel("r0")
    world.steps()
    assert world.held == set() and world.running == [request]
    world.finish()
    assert world.fake.answers[request] == fakes.expected_answer([*HOT, 77], 12)


@pytest.mark.parametrize("cache", ["radix", "chunk", "off"])
def test_seeded_answers_do_not_depend_on_where_they_are_preempted(cache: str) -> None:
    """engine.md 4.25, 4.3 and 4.24: at every token, one row or three; no token twice, none lost."""
    for preempt_at in range(1, 12):
        world = SchedulingWorld(32, token_budget=6, prefix_cache=cache)
        one = world.add(A, max_tokens=7, seed=7)
        three = world.add(B, max_tokens=5, n=3, seed=11)
        world.steps(preempt_at)
        while world.scheduler.preempt_one():
            pass
        world.finish()
        assert world.fake.answers[one] == fakes.expected_sample(A, 7, 7)
        assert world.fake.choices[three] == {i: fakes.expected_sample(B, 5, 11 + i) for i in range(3)}
        world.settled()


@pytest.mark.parametrize("options", [{"n": 3, "seed": 1}, {"beam_width": 3}], ids=["samples", "beams"])
def test_a_group_comes_in_and_goes_as_a_whole(options: dict[str, int]) -> None:
    """engine.md 4.26: not with two of three seats, nor with blocks for two of three rows."""
    world = SchedulingWorld(32, max_num_seqs=4)
    plain = [world.add([base, base + 1], max_tokens=base // 10 - 5) for base in (100, 200)]
    group = world.add(A, max_tokens=6, **options)
    world.steps(3)
    assert world.running == plain and world.waiting == {group}
    world.until(lambda: world.ended(plain[0]))
    world.steps()
    assert world.running == [plain[1], group]
    world.steps(2)
    assert world.scheduler.preempt_one()
    assert world.running == [plain[1]] and world.waiting == {group}
    assert [seq.seq_id for seq in world.scheduler.sequences()] == [plain[1], group]
    world.finish()
    width = options.get("beam_width")
    if width:
        params = BeamParams(width=width, max_tokens=6, eos_token_ids=frozenset({fakes.EOS}))
        wanted = {i: list(beam.tokens) for i, beam in enumerate(fakes.expected_beams(A, params))}
    else:
        wanted = {i: fakes.expected_sample(A, 6, 1 + i) for i in range(3)}
    assert world.fake.choices[group] == wanted
    world.settled()


def test_a_group_waits_until_every_row_has_its_block() -> None:
    """engine.md 4.26: three rows behind a prompt of two blocks need the prompt's blocks and three more."""
    world = SchedulingWorld(12)
    other = world.add(list(range(600, 631)), max_tokens=4)
    world.steps()
    assert world.in_use() == 8
    group = world.add([*A, 9], max_tokens=3, n=3)
    world.steps()
    assert world.waiting == {group}, "4 blocks are left, and it needs 5"
    world.finish()
    assert world.ended(other, group) and world.last(group).error is None
    world.settled()


@pytest.mark.parametrize(
    "options",
    [
        {"token_budget": 1},
        {"max_num_seqs": 1},
        {"max_queue": 9, "max_queue_tokens": 100},
        {"ageing_s": 0.0},
        {"ageing_s": float("inf")},
        {"watermark": 0.99},
        {"scheduling": "fcfs", "hold_back": False},
        {"token_budget": 1, "max_num_seqs": 1, "ageing_s": 0.0, "watermark": 0.99, "prefix_cache": "off"},
        {"prefix_cache": "chunk", "scheduling": "fcfs", "token_budget": 2},
    ],
    ids=str,
)
def test_every_setting_starts_and_answers(options: dict[str, Any]) -> None:
    """engine.md 4.30"""
    world = SchedulingWorld(16, **options)
    prompts = [[*HOT, 1], COLD, [*HOT, 2], [5], [*HOT, 3], A]
    ids = [world.add(prompt, max_tokens=5) for prompt in prompts]
    world.finish()
    assert [world.fake.answers[one] for one in ids] == [fakes.expected_answer(prompt, 5) for prompt in prompts]
    world.settled()


def test_the_last_token_of_a_groups_prompt_is_no_decode_row() -> None:
    """Found here: a leader with one token left passed the bound on scored tokens, and prompts before it in the line."""
    with mock.patch("worker.step_budget.MAX_SCORED", 1):
        world = SchedulingWorld(token_budget=4)
        group = world.add(HOT[:3], max_tokens=2, prompt_logprobs=0, n=2)
        plain = world.add(COLD, max_tokens=2, prompt_logprobs=0)
        world.finish()
    assert world.fake.prompt_logprobs[group] == fakes.expected_prompt_logprobs(HOT[:3])
    assert world.fake.prompt_logprobs[plain] == fakes.expected_prompt_logprobs(COLD)
