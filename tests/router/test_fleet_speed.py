"""FleetSpeed: noise between equal machines does not count, real differences do."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.replica import WorkerId
from cluster.core.step_time import StepShape, StepTimeModel
from router.fleet_speed import FleetSpeed

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
MODEL = StepTimeModel(0.02, 1e-3, 1e-7, 1e-3, 1e-6)
SHAPE = StepShape(300, 60_000.0, 3, 900)


def times(model: StepTimeModel, factor: float) -> StepTimeModel:
    return StepTimeModel(*(factor * value for value in model.to_wire()))


def counted(**factors: float) -> dict[str, float]:
    """The seconds of one step that each replica is credited with, in those of MODEL."""
    speed = FleetSpeed()
    for name, factor in factors.items():
        speed.tell(WorkerId(name), 0.0, times(MODEL, factor), 0.0)
    found = {name: speed.of(WorkerId(name), 0.0).step_time for name in factors}
    return {name: model.seconds(SHAPE) / MODEL.seconds(SHAPE) for name, model in found.items() if model is not None}


def test_equal_models_come_back_unchanged() -> None:
    speed = FleetSpeed()
    speed.tell(A, 5.0, MODEL, 0.0)
    speed.tell(B, 6.0, MODEL, 0.0)
    assert speed.of(A, 0.0).step_time == speed.of(B, 0.0).step_time == MODEL


def test_a_small_difference_is_noise() -> None:
    found = counted(a=1.0, b=1.4)
    assert found["a"] == pytest.approx(found["b"])
    assert 1.0 < found["a"] < 1.4


def test_models_of_equal_speed_that_split_it_otherwise_become_one() -> None:
    """A fit cannot tell the base from the cost of a row where all steps are alike."""
    speed = FleetSpeed()
    speed.tell(A, 0.0, StepTimeModel(0.020, 1e-3, 0, 0, 0), 0.0)
    speed.tell(B, 0.0, StepTimeModel(0.012, 1e-3, 0, 2e-3, 0), 0.0)
    first, second = speed.of(A, 0.0).step_time, speed.of(B, 0.0).step_time
    assert first is not None and second is not None
    assert first.to_wire() == pytest.approx(second.to_wire())


def test_a_replica_that_stands_out_keeps_its_factor() -> None:
    found = counted(a=1.0, b=1.1, c=0.9, d=3.0)
    assert found["a"] == pytest.approx(found["b"]) == pytest.approx(found["c"])
    assert found["d"] / found["a"] > 2.8


def test_of_two_the_one_that_is_three_times_slower_is_much_slower() -> None:
    found = counted(a=1.0, b=3.0)
    assert found["b"] / found["a"] > 2.5


def test_a_replica_without_a_model_is_taken_for_the_middle_one() -> None:
    speed = FleetSpeed()
    speed.tell(A, 0.0, MODEL, 0.0)
    speed.tell(B, 0.0, times(MODEL, 1.1), 0.0)
    speed.tell(C, 90.0, None, 0.0)
    model = speed.of(C, 0.0).step_time
    assert model is not None
    assert MODEL.seconds(SHAPE) <= model.seconds(SHAPE) <= 1.1 * MODEL.seconds(SHAPE)


def test_rates_are_pooled_while_nobody_has_a_model() -> None:
    speed = FleetSpeed()
    speed.tell(A, 1000.0, None, 0.0)
    speed.tell(B, 1300.0, None, 0.0)
    speed.tell(C, 0.0, None, 0.0)
    assert speed.of(A, 0.0).prefill_tokens_per_s == pytest.approx(speed.of(B, 0.0).prefill_tokens_per_s)
    assert speed.of(C, 0.0).prefill_tokens_per_s == 0
    speed.tell(B, 6000.0, None, 0.0)
    assert speed.of(B, 0.0).prefill_tokens_per_s > 3 * speed.of(A, 0.0).prefill_tokens_per_s


def test_a_model_that_is_gone_and_a_worker_that_is_gone_do_not_count() -> None:
    speed = FleetSpeed()
    speed.tell(A, 0.0, MODEL, 0.0)
    speed.tell(B, 0.0, times(MODEL, 1.2), 0.0)
    speed.of(A, 0.0)
    speed.keep_only([A])
    assert speed.of(A, 0.0).step_time == MODEL
    assert speed.of(B, 0.0).step_time is None
    speed.tell(A, 70.0, None, 0.0)
    assert speed.of(A, 0.0) == (70.0, None)


@given(st.lists(st.lists(st.floats(0, 1e300), min_size=5, max_size=5), min_size=1, max_size=6))
def test_whatever_replicas_say_is_finite_and_never_negative(wires: list[list[float]]) -> None:
    speed = FleetSpeed()
    for number, wire in enumerate(wires):
        speed.tell(WorkerId(str(number)), 0.0, StepTimeModel(*wire), 0.0)
    for number in range(len(wires)):
        model = speed.of(WorkerId(str(number)), 0.0).step_time
        assert model is None or all(0 <= one < math.inf for one in model.to_wire())


def test_the_order_of_speeds_is_kept() -> None:
    rng = random.Random(4)
    for _ in range(50):
        factors = {str(n): math.exp(rng.gauss(0, 0.7)) for n in range(8)}
        found = counted(**factors)
        ordered = [found[name] for name in sorted(factors, key=lambda name: factors[name])]
        assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(ordered))


def test_whoever_was_measured_in_a_bad_moment_is_tried_again() -> None:
    """It was six times slower while the machine was busy with something else; avoided for it, it measured nothing more,
    and once it got 6 of 64 requests for as long as the cluster ran."""
    speed = FleetSpeed()
    speed.tell(A, 0.0, MODEL, 0.0)
    speed.tell(B, 0.0, times(MODEL, 6.0), 0.0)

    def ratio(now: float) -> float:
        speed.tell(A, 0.0, times(MODEL, 1.0 + 1e-4 * now), now)
        speed.tell(B, 0.0, times(MODEL, 6.0), now)
        first, second = (speed.of(worker, now).step_time for worker in (A, B))
        assert first is not None and second is not None
        return second.seconds(SHAPE) / first.seconds(SHAPE)

    seen = [ratio(now) for now in range(0, 120, 5)]
    assert seen[0] > 5 and all(a >= b - 1e-6 for a, b in itertools.pairwise(seen))
    assert seen[-1] == pytest.approx(1.0)
    assert MODEL.seconds(SHAPE) * 1.05 > seconds_of(speed, B, 120.0), "the middle is that of the news"
    speed.tell(B, 0.0, times(MODEL, 5.9), 125.0)
    assert seconds_of(speed, B, 125.0) > 3 * seconds_of(speed, A, 125.0), "it is still slow, and says so again"


def seconds_of(speed: FleetSpeed, worker: WorkerId, now: float) -> float:
    model = speed.of(worker, now).step_time
    assert model is not None
    return model.seconds(SHAPE)
