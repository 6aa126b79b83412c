"""Which steps a calibration times, and how well the fit comes out."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path

import pytest

from cluster.bench.calibration import CalibrationLimits, CalibrationStep, calibrate, quality, schedule, tells_apart
from cluster.core.errors import ConfigError
from cluster.core.step_time import StepShape, StepTimeModel
from cluster.simulate.step_times import read_step_time

TRUE = StepTimeModel(2e-2, 8e-4, 2e-8, 3e-3, 6e-7)
WIDE = CalibrationLimits(token_budget=2048, max_num_seqs=64, max_model_len=8192, num_blocks=4096, block_size=16)


def test_a_step_knows_its_shape() -> None:
    assert CalibrationStep(3, 10, 2, 100).shape == StepShape(3, 11 + 12 + 13, 2, 200)


@pytest.mark.parametrize(
    "limits",
    [
        WIDE,
        CalibrationLimits(token_budget=300, max_num_seqs=9, max_model_len=3000, num_blocks=300, block_size=16),
        CalibrationLimits(token_budget=8192, max_num_seqs=256, max_model_len=10**6, num_blocks=10**6, block_size=1),
    ],
)
def test_no_step_exceeds_the_limits_and_small_ones_come_first(limits: CalibrationLimits) -> None:
    steps = schedule(limits)
    for step in steps:
        lengths = [step.length] * step.rows + [step.start + step.piece] * (step.piece > 0)
        assert step.piece + step.rows <= limits.token_budget
        assert len(lengths) <= limits.max_num_seqs
        assert max(lengths) <= limits.max_model_len
        assert sum(-(-length // limits.block_size) for length in lengths) <= limits.num_blocks
    assert [step.work for step in steps] == sorted(step.work for step in steps)
    assert len({step.shape for step in steps}) == len(steps)
    assert tells_apart(steps)
    assert not tells_apart(steps[:5])


@pytest.mark.parametrize("field", ["token_budget", "max_num_seqs", "max_model_len", "num_blocks"])
def test_limits_that_leave_too_few_kinds_are_refused(field: str) -> None:
    values = {"token_budget": 2048, "max_num_seqs": 64, "max_model_len": 8192, "num_blocks": 4096, field: 2}
    with pytest.raises(ConfigError, match="too narrow"):
        schedule(CalibrationLimits(**values, block_size=16))


def test_the_coefficients_come_back_in_spite_of_stalls() -> None:
    rng = random.Random(0)
    times = {
        step.shape: [TRUE.seconds(step.shape) * (1 + rng.gauss(0, 0.01)) for _ in range(5)] for step in schedule(WIDE)
    }
    for seconds in itertools.islice(times.values(), 0, None, 4):
        seconds[2] *= 50
    result = calibrate(times)
    for shape in times:
        assert result.model.seconds(shape) == pytest.approx(TRUE.seconds(shape), rel=0.03)
    assert result.median_error < 0.02
    assert result.steps == 5 * len(times)


def test_exact_times_are_explained_wholly() -> None:
    result = calibrate({step.shape: [TRUE.seconds(step.shape)] for step in schedule(WIDE)})
    assert result.r2 == pytest.approx(1.0, abs=1e-6)
    assert result.median_error < 1e-4


def test_a_model_that_always_says_the_mean_explains_nothing() -> None:
    found = quality(StepTimeModel(2.0, 0, 0, 0, 0), [(StepShape(1, 1.0, 0, 0), 1.0), (StepShape(9, 45.0, 0, 0), 3.0)])
    assert found.r2 == 0.0
    assert found.median_error == pytest.approx((1.0 + 1 / 3) / 2)


def test_too_few_shapes_are_said_so() -> None:
    with pytest.raises(ConfigError, match="too few"):
        calibrate({step.shape: [0.1] for step in schedule(WIDE)[:3]})


@pytest.mark.model
@pytest.mark.torch
@pytest.mark.skipif("KVRAY_LONG" not in os.environ, reason="times the real model: make test-long")
def test_a_short_calibration_of_the_real_model_can_be_simulated_with(demo_model_dir: Path, tmp_path: Path) -> None:
    from cluster.bench.calibrate_command import run_calibrate
    from cluster.config import CacheConfig, EngineConfig

    cache = CacheConfig(kv_memory=2**28)
    config = EngineConfig(model=str(demo_model_dir), device="cpu", threads=1, token_budget=256, cache=cache)
    file = tmp_path / "calibration.json"
    assert run_calibrate(config, seconds=20.0, json_file=file) == 0
    model = read_step_time(file)
    assert model.seconds(StepShape(256, 256 * 128.5, 0, 0)) > model.seconds(StepShape(0, 0.0, 1, 64)) > 0
    assert json.loads(file.read_text())["steps"] > 20
