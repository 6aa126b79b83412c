"""StepStats: the totals are what happened, the state is what is there, and a heartbeat carries both."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from fake_grammar import FakePort
from scheduling_world import SchedulingWorld

from cluster.core.constraint import Constraint
from cluster.core.replica import Epoch, ReplicaLoad
from cluster.core.sampling import SamplingParams
from cluster.core.step_time import StepShape, StepTimeModel
from cluster.index.wire import BadPayload, decode_heartbeat, encode_heartbeat
from worker.batch import Batch, ScheduledSeq
from worker.frame import EngineFrame, EngineMode
from worker.kvcache.block_pool import BlockCounts
from worker.step_meter import StepMeter
from worker.step_shape import step_shape
from worker.step_stats import EngineTotals, StepStats

PREFIX = list(range(1, 17))
REGEX = Constraint.regex("a+")
MODEL = (0.001, 2e-5, 3e-9, 4e-4, 5e-8)


def test_totals_are_what_happened() -> None:
    world = SchedulingWorld(64, max_num_seqs=2, step_s=1.0, max_queue=3)
    ids = [world.add([*PREFIX, 50 + n], max_tokens=4) for n in range(2)]
    world.steps(2)
    late, cancelled = world.add([7, 8, 9], max_tokens=30, timeout_s=2.5), world.add([5, 6], max_tokens=3)
    world.add([1], max_tokens=1)
    refused = world.add([2], max_tokens=1)
    wrong = world.add([5000], max_tokens=1)
    world.cancel(cancelled)
    world.scheduler.preempt_one()
    world.finish()
    stats, deltas = world.fake.engine.last_step, [d for frame in world.fake.frames for d in frame.deltas]
    totals = stats.totals
    assert totals.steps == world.fake.runner.steps == len(world.batches)
    assert totals.generated_tokens == sum(len(d.token_ids) for d in deltas)
    assert totals.prefill_tokens == sum(step_shape(batch).prefill_tokens for batch in world.batches)
    assert totals.finished_requests == 3 and world.ended(*ids, late, cancelled, refused, wrong)
    assert (totals.expired_requests, totals.refused_requests, totals.preemptions) == (1, 2, 1)
    assert totals.query_tokens == 2 * 17 + 1, "of requests that ran, each once"
    assert totals.hit_tokens == world.fake.cached[ids[1]] == 16
    world.settled()


def test_totals_never_decrease_and_a_frame_carries_the_stats_of_its_step() -> None:
    world = SchedulingWorld(16, token_budget=7)
    for n in range(4):
        world.add([*PREFIX[: 5 + n], 60 + n], max_tokens=5, n=1 + n % 2)
    before = EngineTotals()
    while world.fake.engine.has_work:
        world.steps()
        stats = world.fake.engine.last_step
        assert all(getattr(stats.totals, f.name) >= getattr(before, f.name) for f in fields(EngineTotals))
        before = stats.totals
        assert world.fake.frames[-1].load == stats.load() == world.fake.engine.load()
        batch = world.batches[-1]
        tokens = sum(len(seq.token_ids) for seq in batch.seqs)
        assert stats.shape.prefill_tokens + stats.shape.decode_seqs == tokens
    world.steps()
    assert world.fake.engine.last_step.shape == StepShape(0, 0.0, 0, 0) and world.fake.engine.last_step.seconds == 0.0


def test_the_state_tells_who_waits_is_held_and_runs_and_what_is_to_prefill() -> None:
    world = SchedulingWorld(64, token_budget=40, max_num_seqs=3, grammars=FakePort())
    world.add([*PREFIX, 1], max_tokens=5)
    world.add([*PREFIX, 2, 3], max_tokens=5)
    world.add([8] * 5, max_tokens=5, constraint=REGEX)
    world.add(list(range(500, 530)), max_tokens=5)
    load = world.fake.engine.load()
    assert (load.waiting, load.held, load.running, load.paused) == (4, 0, 0, False)
    assert load.uncached_tokens == {"router": 17 + 18 + 5 + 30}
    world.steps()
    load = world.fake.engine.load()
    assert (load.waiting, load.held, load.running) == (2, 1, 2)
    assert load.uncached_tokens == {"router": 18 + 5 + 30 - 23}, "an estimate for who is held"
    world.mode(EngineMode.PAUSE)
    assert world.fake.engine.load().paused


def test_load_mirrors_the_stats_field_by_field() -> None:
    totals = EngineTotals(**{f.name: 100 + n for n, f in enumerate(fields(EngineTotals))})
    blocks = BlockCounts(free=1, cached=2, in_use=4, total=7)
    stats = StepStats(
        waiting=9,
        held=8,
        running=7,
        paused=True,
        uncached_tokens={"a": 3},
        blocks=blocks,
        totals=totals,
        step_time_s=0.5,
        prefill_tokens_per_s=11.0,
        step_time_model=MODEL,
    )
    load = stats.load()
    for f in fields(ReplicaLoad):
        owner: Any = totals if hasattr(totals, f.name) else stats
        if f.name.endswith("_blocks"):
            assert getattr(load, f.name) == getattr(blocks, f.name.removesuffix("_blocks"))
        else:
            assert getattr(load, f.name) == getattr(owner, f.name), f.name
    assert ReplicaLoad.from_wire(load.to_wire()) == load
    assert EngineFrame.from_wire(EngineFrame((), (), load).to_wire(), ReplicaLoad()).load == load
    assert decode_heartbeat(encode_heartbeat(Epoch(3), load)).load == load


def test_an_older_heartbeat_without_the_new_fields_is_read() -> None:
    wire = ReplicaLoad(waiting=3).to_wire()
    for name in ("held", "paused", "step_time_model", "expired_requests", "refused_requests"):
        del wire[name]
    assert ReplicaLoad.from_wire(wire) == ReplicaLoad(waiting=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("paused", 1),
        ("paused", None),
        ("paused", "true"),
        ("held", True),
        ("held", -1),
        ("held", 1.5),
        ("expired_requests", -1),
        ("refused_requests", "3"),
        ("step_time_model", MODEL[:4]),
        ("step_time_model", (*MODEL, 1.0)),
        ("step_time_model", (*MODEL[:4], -1.0)),
        ("step_time_model", (*MODEL[:4], float("nan"))),
        ("step_time_model", (*MODEL[:4], float("inf"))),
        ("step_time_model", (*MODEL[:4], "1")),
        ("step_time_model", (*MODEL[:4], True)),
        ("step_time_model", None),
        ("step_time_model", 5),
        ("step_time_model", {"base": 1.0}),
    ],
)
def test_a_heartbeat_with_a_wrong_field_is_refused(field: str, value: object) -> None:
    load = ReplicaLoad(step_time_model=MODEL, paused=True)
    object.__setattr__(load, field, value)
    with pytest.raises(BadPayload):
        decode_heartbeat(encode_heartbeat(Epoch(1), load))


@pytest.mark.parametrize("model", [(), MODEL, (0.0,) * 5, (1, 0, 0, 0, 2)])
def test_a_heartbeat_with_a_model_or_none_is_read(model: tuple[float, ...]) -> None:
    load = ReplicaLoad(step_time_model=model, paused=True, held=2)
    assert decode_heartbeat(encode_heartbeat(Epoch(1), load)).load == load


def batch_of(*pieces: tuple[int, int]) -> Batch:
    """(tokens, start) of each; a single token behind others is a decode row."""
    sampling = SamplingParams()
    return Batch(tuple(ScheduledSeq("r", [1] * count, start, [0], True, sampling) for count, start in pieces))


def test_the_meter_counts_steps_and_smooths_times() -> None:
    meter = StepMeter()
    meter.observe(batch_of((100, 0), (1, 5)), 0.5, 1)
    assert (meter.steps, meter.prefill_tokens, meter.generated_tokens) == (1, 100, 1)
    assert (meter.step_time_s, meter.prefill_tokens_per_s) == (0.5, 202.0)
    meter.observe(batch_of((1, 5), (1, 6)), 0.1, 2)
    assert meter.prefill_tokens_per_s == 202.0, "a small step says nothing about the rate"
    assert meter.step_time_s == pytest.approx(0.8 * 0.5 + 0.2 * 0.1)
    assert meter.shape == StepShape(0, 0.0, 2, 13)
    meter.rest()
    assert (meter.shape, meter.seconds, meter.steps) == (StepShape(0, 0.0, 0, 0), 0.0, 2)


def test_the_meter_learns_the_model_and_tells_it() -> None:
    meter, true = StepMeter(), StepTimeModel(*MODEL)
    assert meter.step_time_model() == ()
    for n in range(256):
        batch = batch_of((10 + 37 * n % 101, 16 * (n % 7)), *[(1, 30 + 11 * n % 83)] * (n % 5))
        meter.observe(batch, true.seconds(step_shape(batch)), n % 5)
    assert meter.step_time_model() == pytest.approx(MODEL, rel=0.05, abs=1e-7)
