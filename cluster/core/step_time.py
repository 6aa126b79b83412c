"""StepTimeModel: how long an engine step takes, and StepTimeFit, which learns it from the steps that ran.

    t = c0 + c1 * prefill tokens + c2 * prefill context + c3 * decoding sequences + c4 * decode context

Router, simulator and autoscaler ask the same model. The fit keeps the sums of the normal equations, each step weighted
by one over its squared time (so that errors count relative to the step) and less the older it is.

Owns: StepShape, StepTimeModel, its wire form, and the online fit.
Does not: read clocks or batches (worker.step_shape), or decide who uses a prediction for what.
Invariants: coefficients are finite and >= 0, so predictions are, too, and grow with every feature; one step that
took far too long moves the fit by no more than a few steps of ordinary noise do.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from cluster.core.non_negative import solve_non_negative

_MIN_STEPS = 16  # of a kind (prefill, decode) before a prediction is trusted to judge a step of it
_MIN_SHAPES = 4
_MIN_PREFILLS = 8  # before anything is said of what a prefill costs
_REFIT_EVERY = 64
_MAX_WEIGHT = 1e100
_SHORTEST_S = 1e-12
_RIDGE = (1e-12, 1e-9, 1e-9, 1e-9, 1e-9)
_CONTEXT_SHARE = 0.1
_DEVIATIONS_OF_ONE = 1.25  # a standard deviation in mean absolute ones, of the normal distribution
_WIDEST, _NARROWEST = 1.0, 0.02  # of the band in which a step is believed, relative to its prediction
_BAND_IN_DEVIATIONS = 4.0
_DEVIATION_SHARE = 0.05  # of the newest step in the mean deviation


class StepShape(NamedTuple):
    """What a step has to do.

    prefill_tokens: of all pieces.  prefill_context: the positions they attend to, summed over the tokens.
    decode_seqs: rows with one generated token.  decode_context: the positions these read, summed over the rows.
    """

    prefill_tokens: int
    prefill_context: float
    decode_seqs: int
    decode_context: int


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Seconds, per step and per unit of each feature of StepShape."""

    base: float
    per_prefill_token: float
    per_prefill_context: float
    per_decode_seq: float
    per_decode_context: float

    def __post_init__(self) -> None:
        for value in self.to_wire():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
                raise ValueError(f"a step-time coefficient must be a finite number, 0 or more, not {value!r}")

    def seconds(self, shape: StepShape) -> float:
        return (
            self.base
            + self.per_prefill_token * shape.prefill_tokens
            + self.per_prefill_context * shape.prefill_context
            + self.per_decode_seq * shape.decode_seqs
            + self.per_decode_context * shape.decode_context
        )

    def slowed(self, times: float) -> StepTimeModel:
        """Everything takes so many times as long."""
        return StepTimeModel(*(times * value for value in self.to_wire()))

    def to_wire(self) -> list[float]:
        return [
            self.base,
            self.per_prefill_token,
            self.per_prefill_context,
            self.per_decode_seq,
            self.per_decode_context,
        ]

    @classmethod
    def from_wire(cls, wire: Any) -> StepTimeModel:
        """ValueError unless it is a list of five finite numbers, none below 0."""
        if not isinstance(wire, list) or len(wire) != 5:
            raise ValueError(f"a step-time model is a list of five numbers, not {wire!r:.80}")
        return cls(*wire)


class StepTimeFit:
    """Feed it every step. `half_life`: after so many further steps a step counts half.

    `context_share`: how much of a step's time is for its context, give or take, before the steps tell more; infinite
    where they are chosen to tell."""

    def __init__(self, half_life: float = 2000.0, context_share: float = _CONTEXT_SHARE) -> None:
        self._context_share = context_share
        self._growth = 2.0 ** (1.0 / half_life)  # newer steps weigh more, instead of older ones less: nothing to scan
        self._weight = 1.0
        self._sums = [[0.0] * 5 for _ in range(5)]  # lower triangle
        self._right = [0.0] * 5
        self._largest = [0.0] * 5
        self._shapes: set[StepShape] = set()
        self._steps = self._prefills = self._decodes = 0
        self._deviation = _WIDEST / _BAND_IN_DEVIATIONS
        self._model: StepTimeModel | None = None
        self._fitted_at = 0

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long. What cannot be (no time, no work, not finite) is ignored."""
        if not _SHORTEST_S <= seconds < math.inf or not (shape.prefill_tokens or shape.decode_seqs):
            return
        if len(self._shapes) < _MIN_SHAPES:
            self._shapes.add(shape)
        features = (1.0, *shape)
        scale = seconds
        if self._model is not None:
            seconds, scale = self._believed(shape, features, seconds, self._model.seconds(shape))
        self._weight *= self._growth
        weight = self._weight / (scale * scale)
        right, largest = self._right, self._largest
        for i, value in enumerate(features):
            if value:
                weighted = weight * value
                row = self._sums[i]
                for j in range(i + 1):
                    row[j] += weighted * features[j]
                right[i] += weighted * seconds
                if value > largest[i]:
                    largest[i] = value
        self._count(shape)

    def model(self) -> StepTimeModel | None:
        """None until some steps of several shapes were seen, and enough with prefill if there are any."""
        if self._steps < _MIN_STEPS or len(self._shapes) < _MIN_SHAPES or 0 < self._prefills < _MIN_PREFILLS:
            return None
        if self._fitted_at != self._steps:
            self._refit()
        return self._model

    def _believed(
        self, shape: StepShape, features: tuple[float, ...], seconds: float, predicted: float
    ) -> tuple[float, float]:
        """The time to learn from, and what its error is relative to."""
        known = (not shape.prefill_tokens or self._prefills >= _MIN_STEPS) and (
            not shape.decode_seqs or self._decodes >= _MIN_STEPS
        )
        if not known or any(value > 1.5 * most for value, most in zip(features, self._largest, strict=True)):
            return seconds, max(seconds, predicted)  # the model cannot judge what it has not seen
        band = predicted * max(_NARROWEST, _BAND_IN_DEVIATIONS * self._deviation)
        error = max(-band, min(band, seconds - predicted))
        self._deviation += _DEVIATION_SHARE * (abs(error) / max(predicted, _SHORTEST_S) - self._deviation)
        return predicted + error, max(predicted, 0.1 * seconds, _SHORTEST_S)

    def _count(self, shape: StepShape) -> None:
        self._steps += 1
        self._prefills += shape.prefill_tokens > 0
        self._decodes += shape.decode_seqs > 0
        if self._weight > _MAX_WEIGHT:
            factor, self._weight = 1.0 / self._weight, 1.0
            self._sums = [[value * factor for value in row] for row in self._sums]
            self._right = [value * factor for value in self._right]
        due = max(_MIN_STEPS, min(_REFIT_EVERY, self._fitted_at // 2))
        if self._steps - self._fitted_at >= due and len(self._shapes) >= _MIN_SHAPES:
            self._refit()

    def _refit(self) -> None:
        """In units in which every feature has the same size, because they differ by a factor of a million.

        The ridge pulls towards zero where the steps cannot tell features apart, the slopes before the base: then the
        whole time counts as the cost of a step, not as one that grows. What a context costs is doubted most: of short
        prompts noise alone would tell, and a long one's estimate has a thousand times as much of it. So there the ridge
        is that of a Gaussian prior of `context_share`, which weighs less the more steps there were, and the less noisy.
        """
        noise = (_DEVIATIONS_OF_ONE * self._deviation / self._context_share) ** 2
        doubt = (0.0, 0.0, noise / max(self._prefills, 1), 0.0, noise / max(self._decodes, 1))
        sums = self._sums
        size = [math.sqrt(sums[i][i]) or 1.0 for i in range(5)]
        matrix = [[sums[max(i, j)][min(i, j)] / (size[i] * size[j]) for j in range(5)] for i in range(5)]
        for i in range(5):
            matrix[i][i] = 1.0 + _RIDGE[i] + doubt[i] if sums[i][i] else 1.0
        found = solve_non_negative(matrix, [value / unit for value, unit in zip(self._right, size, strict=True)])
        self._model = StepTimeModel(*(value / unit for value, unit in zip(found, size, strict=True)))
        self._fitted_at = self._steps
