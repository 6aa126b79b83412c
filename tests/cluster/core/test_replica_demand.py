"""ReplicaDemand: from a load to six numbers, over the wire, and what is refused."""

from __future__ import annotations

import math

import pytest

from cluster.core.replica import ReplicaLoad
from cluster.core.replica_demand import ReplicaDemand, demand_of
from cluster.core.step_time import StepTimeModel

MODEL = StepTimeModel(0.1, 0.001, 0.0, 0.01, 1e-6)


def of(load: ReplicaLoad, answered: int = 0, late: int = 0) -> ReplicaDemand:
    return demand_of(load, token_budget=1000, max_num_seqs=10, block_size=16, answered=answered, late=late)


def test_queued_seconds_are_those_of_the_steps_that_the_tokens_need() -> None:
    load = ReplicaLoad(
        waiting=2,
        running=5,
        uncached_tokens={"a": 1500, "b": 900},
        in_use_blocks=100,
        total_blocks=400,
        step_time_model=tuple(MODEL.to_wire()),
        loaded_s=7.0,
    )
    demand = of(load, 9, 2)
    assert demand.queued_s == pytest.approx(2400 * 0.001 + 3 * (0.1 + 5 * 0.01 + 1600 * 1e-6))
    assert demand == ReplicaDemand(demand.queued_s, 7.0, 0.25, 0.7, 9, 2)


def test_longer_prompts_attend_to_more() -> None:
    times = StepTimeModel(0.0, 0.0, 1e-6, 0.0, 0.0)
    one, ten = (
        of(ReplicaLoad(waiting=n, uncached_tokens={"a": 1000}, step_time_model=tuple(times.to_wire()))).queued_s
        for n in (1, 10)
    )
    assert one == pytest.approx(0.5) and ten == pytest.approx(0.05)


def test_without_a_model_the_measured_rate_counts_and_without_that_nothing() -> None:
    assert of(ReplicaLoad(uncached_tokens={"a": 500}, prefill_tokens_per_s=250.0)).queued_s == 2.0
    assert of(ReplicaLoad(uncached_tokens={"a": 500})).queued_s == 0.0
    assert of(ReplicaLoad()) == ReplicaDemand()


def test_what_is_sent_arrives() -> None:
    demand = ReplicaDemand(1.5, 2.5, 0.5, 3.0, 9.0, 2.0)
    numbers = demand.to_numbers()
    assert all(type(value) is float for value in numbers.values())
    assert ReplicaDemand.from_numbers(numbers) == demand
    assert ReplicaDemand.from_numbers({**numbers, "something": 1.0}) == demand


@pytest.mark.parametrize("name", ReplicaDemand._fields)
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, -math.inf, 1e300, True, "1", None])
def test_a_report_with_an_impossible_number_is_none(name: str, value: object) -> None:
    numbers: dict[str, object] = dict(ReplicaDemand().to_numbers())
    assert ReplicaDemand.from_numbers({**numbers, name: value}) is None  # type: ignore[dict-item]
    del numbers[name]
    assert ReplicaDemand.from_numbers(numbers) is None  # type: ignore[arg-type]
