"""StepTimeFit and StepTimeModel: recovery, noise, outliers, drift, poor data, wire form, monotony."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.step_time import StepShape, StepTimeFit, StepTimeModel

TRUE = StepTimeModel(7e-3, 3.2e-5, 1.3e-9, 1e-5, 4.9e-8)


def prefill(tokens: int, start: int = 0) -> StepShape:
    return StepShape(tokens, tokens * (start + (tokens + 1) / 2), 0, 0)


def decode(rows: int, length: int) -> StepShape:
    return StepShape(0, 0.0, rows, rows * length)


def mixed(rng: random.Random, count: int) -> Iterator[StepShape]:
    """As a busy engine sees them: decode steps, pieces of prompts, and both together."""
    for _ in range(count):
        kind = rng.randrange(3)
        piece = prefill(rng.choice([17, 100, 500, 2000]), rng.randrange(50_000)) if kind else prefill(0)
        rows = decode(rng.randint(1, 64), rng.randint(100, 20_000)) if kind != 1 else decode(0, 0)
        yield StepShape(piece.prefill_tokens, piece.prefill_context, rows.decode_seqs, rows.decode_context)


def fitted(fit: StepTimeFit) -> StepTimeModel:
    model = fit.model()
    assert model is not None
    return model


def worst_error(model: StepTimeModel, truth: StepTimeModel, shapes: Iterator[StepShape]) -> float:
    return max(abs(model.seconds(shape) / truth.seconds(shape) - 1) for shape in shapes)


def test_the_time_is_the_sum_of_the_parts() -> None:
    model = StepTimeModel(1.0, 2.0, 3.0, 4.0, 5.0)
    assert model.seconds(StepShape(10, 100.0, 1000, 10000)) == 1 + 20 + 300 + 4000 + 50000


def test_without_noise_the_coefficients_come_back() -> None:
    fit, rng = StepTimeFit(), random.Random(0)
    for shape in mixed(rng, 300):
        fit.observe(shape, TRUE.seconds(shape))
    assert fitted(fit).to_wire() == pytest.approx(TRUE.to_wire(), rel=1e-4)


@pytest.mark.parametrize(("noise", "bound"), [(0.05, 0.03), (0.2, 0.1)])
def test_with_noise_predictions_are_close(noise: float, bound: float) -> None:
    fit, rng = StepTimeFit(), random.Random(1)
    for shape in mixed(rng, 4000):
        fit.observe(shape, TRUE.seconds(shape) * max(1 + rng.gauss(0, noise), 0.1))
    assert worst_error(fitted(fit), TRUE, mixed(random.Random(2), 300)) < bound


@pytest.mark.parametrize("first", [True, False])
def test_steps_that_took_fifty_times_as_long_do_not_wreck_it(first: bool) -> None:
    """Also when the very first one is such a step, as it is after a start."""
    fit, rng = StepTimeFit(), random.Random(3)
    for number, shape in enumerate(mixed(rng, 3000)):
        stalled = number == 0 if first else number % 100 == 50
        fit.observe(shape, TRUE.seconds(shape) * (50 if stalled else 1) * (1 + rng.gauss(0, 0.02)))
    assert worst_error(fitted(fit), TRUE, mixed(random.Random(4), 300)) < 0.03


def test_one_outlier_moves_a_settled_fit_by_little() -> None:
    fit, rng = StepTimeFit(), random.Random(5)
    for shape in mixed(rng, 1000):
        fit.observe(shape, TRUE.seconds(shape) * (1 + rng.gauss(0, 0.02)))
    before = fitted(fit)
    fit.observe(decode(8, 1000), 50 * TRUE.seconds(decode(8, 1000)))
    assert worst_error(fitted(fit), before, mixed(random.Random(6), 300)) < 0.005


@pytest.mark.parametrize("factor", [0.3, 3.0, 30.0])
def test_it_follows_a_change(factor: float) -> None:
    fit, rng = StepTimeFit(half_life=200), random.Random(7)
    changed = StepTimeModel(*(factor * value for value in TRUE.to_wire()))
    for model in (TRUE, changed):
        for shape in mixed(rng, 4000):
            fit.observe(shape, model.seconds(shape) * (1 + rng.gauss(0, 0.02)))
    assert worst_error(fitted(fit), changed, mixed(random.Random(8), 300)) < 0.05


def test_nothing_is_said_before_enough_was_seen() -> None:
    fit = StepTimeFit()
    assert fit.model() is None
    for _ in range(1000):
        fit.observe(decode(1, 100), 0.01)
    assert fit.model() is None  # a thousand times the same says one thing
    for length in range(100, 104):
        fit.observe(decode(1, length), 0.01)
    assert fit.model() is not None


def test_few_prefills_say_nothing_of_what_one_costs() -> None:
    fit, rng = StepTimeFit(), random.Random(13)
    for shape in [decode(1, 100 + number) for number in range(100)] + [prefill(30 + number) for number in range(7)]:
        fit.observe(shape, TRUE.seconds(shape) * (1 + rng.gauss(0, 0.1)))
    assert fit.model() is None
    fit.observe(prefill(50), TRUE.seconds(prefill(50)))
    assert fit.model() is not None


def test_noise_on_short_prompts_does_not_say_what_a_long_one_costs() -> None:
    """Which of two replicas is slower would be a matter of chance, and the dearer one would not be tried again."""
    truth = StepTimeModel(0.03, 3.5e-3, 3.6e-6, 4e-3, 1e-6)  # of a small model on a CPU
    for seed in range(40):
        fit, rng = StepTimeFit(), random.Random(seed)
        for _ in range(16):
            tokens = rng.choice([64, 65, 80, 100, 128])
            for shape in [prefill(tokens), *(decode(1, tokens + number) for number in range(8))]:
                fit.observe(shape, truth.seconds(shape) * math.exp(rng.gauss(0, 0.15)))
        assert 0.5 < fitted(fit).seconds(prefill(900)) / truth.seconds(prefill(900)) < 2, seed


def test_what_cannot_be_is_ignored() -> None:
    fit = StepTimeFit()
    for seconds in (0.0, -1.0, math.inf, math.nan):
        for length in range(50):
            fit.observe(decode(1, 100 + length), seconds)
    for length in range(50):
        fit.observe(decode(0, 100 + length), 1.0)
    assert fit.model() is None


def test_decode_alone_says_nothing_of_prefill() -> None:
    fit, rng = StepTimeFit(), random.Random(9)
    for _ in range(500):
        shape = decode(rng.randint(1, 64), rng.randint(100, 5000))
        fit.observe(shape, TRUE.seconds(shape))
    model = fitted(fit)
    assert (model.per_prefill_token, model.per_prefill_context) == (0.0, 0.0)
    assert model.per_decode_seq == pytest.approx(TRUE.per_decode_seq, rel=1e-2)


def test_the_first_prefill_after_many_decodes_is_believed() -> None:
    fit, rng = StepTimeFit(), random.Random(10)
    for _ in range(2000):
        shape = decode(rng.randint(1, 64), rng.randint(100, 5000))
        fit.observe(shape, TRUE.seconds(shape))
    for number in range(12):
        shape = prefill(500 + 100 * number, 1000 * number)
        fit.observe(shape, TRUE.seconds(shape))
    shape = prefill(1000, 5000)
    assert fitted(fit).seconds(shape) == pytest.approx(TRUE.seconds(shape), rel=0.02)


def test_what_prefill_costs_is_kept_through_a_long_decode_stretch() -> None:
    fit, rng = StepTimeFit(half_life=500), random.Random(11)
    for shape in mixed(rng, 1000):
        fit.observe(shape, TRUE.seconds(shape) * (1 + rng.gauss(0, 0.02)))
    for _ in range(20_000):
        shape = decode(rng.randint(1, 64), rng.randint(100, 20_000))
        fit.observe(shape, TRUE.seconds(shape) * (1 + rng.gauss(0, 0.02)))
    assert worst_error(fitted(fit), TRUE, mixed(random.Random(12), 300)) < 0.05


def test_what_cannot_be_told_apart_counts_as_the_base() -> None:
    """One row at a time: per step or per row? Sixty-four rows must not be predicted sixty-four times as long."""
    fit = StepTimeFit()
    for length in range(1000, 1200):
        fit.observe(decode(1, length), TRUE.seconds(decode(1, length)))
    model = fitted(fit)
    assert model.seconds(decode(1, 1100)) == pytest.approx(TRUE.seconds(decode(1, 1100)), rel=1e-3)
    assert model.seconds(decode(64, 1100)) < 2 * TRUE.seconds(decode(64, 1100))


def test_equal_pieces_alone_are_predicted_well() -> None:
    fit = StepTimeFit()
    for start in (0, 512, 1024, 1536) * 20:
        fit.observe(prefill(512, start), TRUE.seconds(prefill(512, start)))
    assert fitted(fit).seconds(prefill(512, 700)) == pytest.approx(TRUE.seconds(prefill(512, 700)), rel=1e-3)


def test_many_steps_do_not_overflow() -> None:
    fit, rng = StepTimeFit(half_life=5), random.Random(13)
    for shape in mixed(rng, 5000):
        fit.observe(shape, TRUE.seconds(shape))
    assert worst_error(fitted(fit), TRUE, mixed(random.Random(14), 100)) < 0.05


def test_the_wire_form_is_a_list_of_five() -> None:
    assert TRUE.to_wire() == [7e-3, 3.2e-5, 1.3e-9, 1e-5, 4.9e-8]
    assert StepTimeModel.from_wire(TRUE.to_wire()) == TRUE


@pytest.mark.parametrize(
    "wire",
    [
        None,
        "12345",
        (1.0, 1.0, 1.0, 1.0, 1.0),
        {"0": 1.0},
        [],
        [1.0] * 4,
        [1.0] * 6,
        [1.0, 1.0, 1.0, 1.0, -1e-9],
        [1.0, 1.0, 1.0, 1.0, math.nan],
        [1.0, 1.0, 1.0, 1.0, math.inf],
        [1.0, 1.0, 1.0, 1.0, "1"],
        [1.0, 1.0, 1.0, 1.0, None],
        [1.0, 1.0, 1.0, 1.0, True],
        [1.0, 1.0, 1.0, 1.0, [1.0]],
        [10**400, 1.0, 1.0, 1.0, 1.0],
    ],
)
def test_anything_else_is_refused(wire: Any) -> None:
    with pytest.raises(ValueError, match="step-time"):
        StepTimeModel.from_wire(wire)


SHAPES = st.builds(
    StepShape,
    prefill_tokens=st.integers(0, 10**5),
    prefill_context=st.floats(0, 1e10),
    decode_seqs=st.integers(0, 4096),
    decode_context=st.integers(0, 10**9),
)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(st.tuples(SHAPES, st.floats(0, 1e300)), min_size=20, max_size=80),
    shape=SHAPES,
    more=st.tuples(st.integers(0, 1000), st.integers(0, 10**6), st.integers(0, 64), st.integers(0, 10**6)),
)
def test_predictions_are_finite_and_grow_with_the_work(
    steps: list[tuple[StepShape, float]], shape: StepShape, more: tuple[int, int, int, int]
) -> None:
    fit = StepTimeFit(half_life=50)
    for one, seconds in steps:
        fit.observe(one, seconds)
    model = fit.model()
    if model is None:
        return
    assert 0 <= model.seconds(shape) < math.inf
    for index in range(4):
        grown: dict[str, Any] = {shape._fields[index]: shape[index] + more[index]}
        assert model.seconds(shape._replace(**grown)) >= model.seconds(shape)
