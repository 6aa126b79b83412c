"""Calibration: which steps to time so that a step-time model can be fitted, and how well it then fits.

    prefill   pieces of several sizes at several starts      sizes x starts
    decode    batches of several sizes at several lengths    rows x lengths
    mixed     a piece with decode rows beside it

Owns: the schedule within the limits of an engine, the fit, and its quality.
Does not: run steps (calibrate_command) or solve (cluster.core.step_time).
Invariants: no step of the schedule exceeds token budget, seats, model length or pool; small steps come first, so that
whoever is short of time can stop anywhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.core.errors import ConfigError
from cluster.core.step_time import StepShape, StepTimeFit, StepTimeModel

_PIECES = (16, 64, 256, 512, 1024, 2048)
_STARTS = (0, 512, 2048, 8192, 32768)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LENGTHS = (32, 512, 2048, 8192, 32768)
_MIXED_ROWS = (4, 16)
_POSITIONS_PER_TOKEN = 2000


class CalibrationStep(NamedTuple):
    """A piece of `piece` tokens (0: none) behind `start` others, and `rows` decode rows of `length` positions each."""

    piece: int
    start: int
    rows: int
    length: int

    @property
    def shape(self) -> StepShape:
        context = self.piece * (self.start + (self.piece + 1) / 2)
        return StepShape(self.piece, context, self.rows, self.rows * self.length)

    @property
    def work(self) -> float:
        """For ordering only: a model's products, and a little for each position read."""
        return self.piece + self.rows + (self.shape.prefill_context + self.shape.decode_context) / _POSITIONS_PER_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationLimits:
    token_budget: int
    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    block_size: int

    def allows(self, step: CalibrationStep) -> bool:
        lengths = [step.length] * step.rows + ([step.start + step.piece] if step.piece else [])
        blocks = sum(-(-length // self.block_size) for length in lengths)
        return (
            blocks <= self.num_blocks
            and max(lengths) <= self.max_model_len
            and len(lengths) <= self.max_num_seqs
            and step.piece + step.rows <= self.token_budget
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """r2: share of the variance explained.  median_error: of the prediction, relative to the measured time."""

    model: StepTimeModel
    steps: int
    r2: float
    median_error: float


def schedule(limits: CalibrationLimits) -> list[CalibrationStep]:
    """ConfigError when the limits leave too few steps to tell the coefficients apart."""
    pieces = [CalibrationStep(piece, start, 0, 0) for piece in _PIECES for start in _STARTS]
    decodes = [CalibrationStep(0, 0, rows, length) for rows in _ROWS for length in _LENGTHS]
    mixed = [CalibrationStep(piece, 0, rows, 512) for piece in (256, 1024) for rows in _MIXED_ROWS]
    steps = [step for step in (*pieces, *decodes, *mixed) if limits.allows(step)]
    if not tells_apart(steps):
        raise ConfigError("calibrate: these limits are too narrow; allow more memory, tokens or sequences")
    return sorted(steps, key=lambda step: step.work)


def tells_apart(steps: Sequence[CalibrationStep]) -> bool:
    """Whether these show what each feature costs: several sizes, each at several depths."""
    prefills = {(step.piece, step.start) for step in steps if step.piece}
    decodes = {(step.rows, step.length) for step in steps if step.rows}
    return all(
        len(pairs) >= 8 and len({a for a, _ in pairs}) >= 3 and len({b for _, b in pairs}) >= 2
        for pairs in (prefills, decodes)
    )


def calibrate(times: Mapping[StepShape, Sequence[float]]) -> Calibration:
    """`times`: what each shape took, in seconds, as often as it ran. Of each the median counts, so stalls do not."""
    fit = StepTimeFit(half_life=math.inf, context_share=math.inf)
    for shape, seconds in times.items():
        fit.observe(shape, statistics.median(seconds))
    model = fit.model()
    if model is None:
        raise ConfigError("calibrate: too few kinds of steps were timed; give it more seconds")
    return quality(model, ((shape, one) for shape, seconds in times.items() for one in seconds))


def quality(model: StepTimeModel, steps: Iterable[tuple[StepShape, float]]) -> Calibration:
    pairs = [(model.seconds(shape), seconds) for shape, seconds in steps]
    mean = statistics.fmean(seconds for _, seconds in pairs)
    total = math.fsum((seconds - mean) ** 2 for _, seconds in pairs)
    left = math.fsum((seconds - predicted) ** 2 for predicted, seconds in pairs)
    return Calibration(
        model=model,
        steps=len(pairs),
        r2=1.0 - left / total if total else 0.0,
        median_error=statistics.median(abs(predicted - seconds) / seconds for predicted, seconds in pairs),
    )
