"""Random lives with priorities, deadlines, pauses, aborts, groups, tiny pools: answers, order, progress, accounts."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import fake_engine as fakes
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_world import SchedulingWorld

from cluster.core.errors import DeadlineExceeded, InvalidRequest, Overloaded
from cluster.core.request import FinishReason
from worker.beam_search import BeamParams
from worker.frame import EngineMode
from worker.sequence import Sequence
from worker.step_budget import StepBudget

PREFIXES = [list(range(1, 13)), [*range(1, 9), 70, 71, 72, 73], [200, 201, 202, 203, 204], [*range(1, 13), 90, 91]]
STEP_S = 0.25

requests = st.fixed_dictionaries(
    {
        "prefix": st.integers(0, len(PREFIXES) - 1),
        "tail": st.lists(st.integers(300, 303), max_size=6),
        "max_tokens": st.integers(1, 12),
        "priority": st.sampled_from([0, 0, 0, 0, -1, 1, 2]),
        "timeout_s": st.sampled_from([None, None, None, None, 0.0, 0.4, 1.0, 3.0, 10.0]),
        "cache_salt": st.sampled_from(["", "", "", "salt"]),
        "rows": st.sampled_from([{}, {}, {}, {"n": 2}, {"n": 3, "seed": 7}, {"beam_width": 2}, {"beam_width": 3}]),
        "scores": st.sampled_from([False, False, False, True]),
    }
)
actions = st.one_of(
    st.tuples(st.just("add"), requests),
    st.tuples(st.just("add"), requests),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.sampled_from(["pause", "resume", "drain", "reset", "preempt"]), st.none()),
)
engines = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(10, 24),
        "token_budget": st.integers(1, 40),
        "max_num_seqs": st.integers(1, 6),
        "max_queue": st.sampled_from([1000, 1000, 3]),
        "max_queue_tokens": st.sampled_from([None, None, 40]),
        "prefix_cache": st.sampled_from(["radix", "radix", "chunk", "off"]),
        "scheduling": st.sampled_from(["prefix", "prefix", "fcfs"]),
        "ageing_s": st.sampled_from([0.0, 0.5, 2.0, float("inf")]),
        "hold_back": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.0, 0.1, 0.5]),
    }
)


@settings(max_examples=5000 if os.environ.get("KVRAY_LONG") else 120, deadline=None)
@given(script=st.lists(actions, max_size=50), engine=engines, max_scored=st.sampled_from([1, 5, 128]))
def test_whatever_happens_the_answers_the_order_and_the_accounts_are_right(
    script: list[tuple[str, Any]], engine: dict[str, Any], max_scored: int
) -> None:
    with mock.patch("worker.step_budget.MAX_SCORED", max_scored):
        life = Life(engine)
        for name, value in script:
            life.act(name, value)
        life.end()


class Life:
    def __init__(self, engine: dict[str, Any]) -> None:
        options = dict(engine)
        self.limits = engine
        self.world = SchedulingWorld(options.pop("num_blocks"), step_s=STEP_S, **options)
        self.asked: dict[str, dict[str, Any]] = {}
        self.cancelled: set[str] = set()
        self.held_since: dict[tuple[str, str], float] = {}  # by request and leader
        self.admission = self.world.scheduler._admission
        self._admit, self.admission.admit = self.admission.admit, self.admit  # type: ignore[method-assign]

    def act(self, name: str, value: Any) -> None:
        world = self.world
        match name:
            case "add":
                self.add(value)
            case "step":
                for _ in range(value):
                    self.step()
            case "cancel":
                if f"r{value}" in self.asked and f"r{value}" not in world.fake.last:
                    self.cancelled.add(f"r{value}")
                world.cancel(f"r{value}")
            case "reset":
                world.fake.engine.reset_cache()
            case "preempt":
                world.scheduler.preempt_one()
            case _:
                world.mode(EngineMode(name))

    def add(self, asked: dict[str, Any]) -> None:
        prompt = PREFIXES[asked["prefix"]] + asked["tail"]
        options = {**asked["rows"], "prompt_logprobs": 0 if asked["scores"] else None}
        options |= {name: asked[name] for name in ("priority", "timeout_s", "cache_salt")}
        request = self.world.add(prompt, asked["max_tokens"], **options)
        self.asked[request] = {**asked, "prompt": prompt, "at": self.world.clock.now}

    def admit(self, seq: Sequence, step: StepBudget, prefilling: list[Sequence], now: float) -> bool:
        """Judges every admission: `seq` is held, or starts, or waits on."""
        held_by = [seq.held_by for seq in self.world.queue if seq.held_by is not None]
        assert all(leader in self.world.scheduler._live for leader in held_by), "somebody waits for nobody"
        waiting = [other for other in self.world.queue if other is not seq and other.held_by is None]
        preempted = self.world.preemptions
        admitted = self._admit(seq, step, prefilling, now)
        assert admitted or self.world.preemptions == preempted, "somebody was preempted in vain"
        if admitted and seq.held_by is None:
            self.check_order(seq, [other for other in waiting if other.held_by is None], now)
        return admitted

    def check_order(self, seq: Sequence, waiting: list[Sequence], now: float) -> None:
        assert all(other.request.priority >= seq.request.priority for other in waiting if other.arrival != seq.arrival)
        if seq.preemptions:
            return
        for other in waiting:
            if other.request.priority == seq.request.priority:
                assert not other.preemptions, "somebody who never ran passed a preempted one"
                aged = now - other.arrived_at >= self.limits["ageing_s"] or self.limits["scheduling"] == "fcfs"
                assert not aged or seq.arrival < other.arrival, "an aged one was passed by a younger one"

    def step(self) -> None:
        world, runner = self.world, self.world.fake.runner
        scheduler, before = world.scheduler, (runner.computed_tokens, runner.steps)
        world.steps()
        computed = runner.computed_tokens - before[0]
        assert computed <= self.limits["token_budget"]
        assert sum(len(batch.seqs) for batch in world.batches[before[1] :]) <= max(computed, 0)
        if scheduler.paused:
            assert computed == 0
        elif computed == 0:
            assert not scheduler.has_work, "a step without progress"
        seats = sum(1 if seq.group is None else seq.group.seats_of(seq) for seq in scheduler.running)
        assert seats <= self.limits["max_num_seqs"]
        self.check_accounts()
        self.check_holds()

    def check_accounts(self) -> None:
        world, queue = self.world, self.world.queue
        load = world.fake.engine.load()
        assert load.waiting == len(queue) and load.held == queue.num_held == len(world.held)
        assert queue.num_tokens == sum(seq.num_tokens for seq in queue)
        live = [*queue, *world.scheduler.running]
        assert load.total_uncached_tokens == sum(seq.uncached_tokens for seq in live)
        assert load.free_blocks + load.cached_blocks + load.in_use_blocks == load.total_blocks
        for members in queue._classes.values():
            assert max(len(members._by_key), len(members._by_age)) <= 2 * members.count + 17
        assert len(queue._turns) <= 2 * len(queue) + 17

    def check_holds(self) -> None:
        now = self.world.clock.now
        held = [(seq.seq_id, str(seq.held_by)) for seq in self.world.queue if seq.held_by is not None]
        self.held_since = {hold: self.held_since.get(hold, now) for hold in held}
        if not self.world.scheduler.paused:
            longest = self.limits["ageing_s"]
            assert all(now - since <= longest for since in self.held_since.values()), "a hold lasts too long"

    def end(self) -> None:
        self.world.mode(EngineMode.RESUME)
        for _ in range(3000):
            if not self.world.fake.engine.has_work:
                break
            self.step()
        self.step()
        for request, asked in self.asked.items():
            self.check_answer(request, asked)
        self.world.settled()
        lasts = [d.request_id for frame in self.world.fake.frames for d in frame.deltas if d.last]
        assert sorted(lasts) == sorted(self.asked), "exactly one last delta each"
        totals = self.world.fake.engine.last_step.totals
        assert totals.generated_tokens == sum(len(d.token_ids) for f in self.world.fake.frames for d in f.deltas)
        ends = list(self.world.fake.last.values())
        assert totals.expired_requests == sum(isinstance(d.error, DeadlineExceeded) for d in ends)
        assert totals.refused_requests == sum(isinstance(d.error, InvalidRequest | Overloaded) for d in ends)
        cancelled = sum(d.finish_reason is FinishReason.CANCELLED for d in ends)
        assert totals.finished_requests == len(ends) - totals.expired_requests - totals.refused_requests - cancelled

    def check_answer(self, request: str, asked: dict[str, Any]) -> None:
        got, last = self.world.fake.choices.get(request, {}), self.world.last(request)
        wanted = expected(asked)
        if last.finish_reason is FinishReason.CANCELLED:
            assert request in self.cancelled
        elif last.error is None:
            assert got == wanted
            prompt_logprobs = fakes.expected_prompt_logprobs(asked["prompt"]) if asked["scores"] else None
            assert self.world.fake.prompt_logprobs.get(request) == prompt_logprobs
        elif isinstance(last.error, DeadlineExceeded):
            assert asked["timeout_s"] is not None
        else:
            assert isinstance(last.error, InvalidRequest | Overloaded) and not any(got.values())
        assert all(tokens == wanted[index][: len(tokens)] for index, tokens in got.items())


def expected(asked: dict[str, Any]) -> dict[int, list[int]]:
    prompt, max_tokens, rows = asked["prompt"], asked["max_tokens"], asked["rows"]
    if width := rows.get("beam_width"):
        params = BeamParams(width=width, max_tokens=max_tokens, eos_token_ids=frozenset({fakes.EOS}))
        return {i: list(beam.tokens) for i, beam in enumerate(fakes.expected_beams(prompt, params))}
    seed = rows.get("seed", 0)
    return {i: fakes.expected_sample(prompt, max_tokens, seed + i) for i in range(rows.get("n", 1))}
