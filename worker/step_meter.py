"""StepMeter: how long steps take: totals, recent means, and the step-time model that is fitted to them.

Owns: these measures of one engine.
Does not: read clocks (engine) or judge them.
Invariants: a step costs a few microseconds here; means follow the last ten steps or so.
"""

from __future__ import annotations

from cluster.core.step_time import StepShape, StepTimeFit
from worker.batch import Batch
from worker.step_shape import step_shape
from worker.step_stats import IDLE

_SMOOTHING = 0.2
_SMALLEST_PREFILL = 64  # smaller steps say more about overhead than about the prefill rate
_MODEL_EVERY = 64  # steps between two looks at the fit: it changes slowly, and solving costs more than a step's books


class StepMeter:
    def __init__(self) -> None:
        self._fit = StepTimeFit()
        self._model: tuple[float, ...] = ()
        self.shape: StepShape = IDLE
        self.seconds = 0.0
        self.steps = 0
        self.prefill_tokens = 0
        self.generated_tokens = 0
        self.loaded_s = 0.0
        self.step_time_s = 0.0
        self.prefill_tokens_per_s = 0.0

    def observe(self, batch: Batch, seconds: float, generated: int, waiting: int = 0) -> None:
        """`waiting`: requests that the step left without a place."""
        seconds = max(seconds, 1e-9)
        shape = step_shape(batch)
        if shape.prefill_tokens or waiting:
            self.loaded_s += seconds
        self._fit.observe(shape, seconds)
        self.shape, self.seconds = shape, seconds
        self.steps += 1
        self.prefill_tokens += shape.prefill_tokens
        self.generated_tokens += generated
        self.step_time_s = _smooth(self.step_time_s, seconds)
        if shape.prefill_tokens and shape.prefill_tokens + shape.decode_seqs >= _SMALLEST_PREFILL:
            rate = (shape.prefill_tokens + shape.decode_seqs) / seconds
            self.prefill_tokens_per_s = _smooth(self.prefill_tokens_per_s, rate)
        if self.steps % _MODEL_EVERY == 0 and (model := self._fit.model()) is not None:
            self._model = tuple(model.to_wire())

    def rest(self) -> None:
        """There was no step."""
        self.shape, self.seconds = IDLE, 0.0

    def step_time_model(self) -> tuple[float, ...]:
        """Its five coefficients, or nothing while unknown."""
        return self._model


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - _SMOOTHING) * old + _SMOOTHING * new
