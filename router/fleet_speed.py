"""FleetSpeed: the replicas' speeds without the noise of measuring each alone.

Every replica fits its own step-time model, and two equal machines never report the same one. Taken as it is, the
difference sends every lone request to whoever looks a little faster, while the others idle. So all models are pooled to
one form, and a replica keeps a factor of its own only as far as it stands out:

    factor by which its steps are slower   1.0 .. 1.25   1.5   2 and above     (and the same below 1)
    what counts of it                      1.0           1.31  all of it

and only for as long as it is news: who was measured in a bad moment and is avoided for it measures nothing any more, so
its distance from the others fades until it is tried again. One that has no model yet, because it is new, is taken for
one of the middle.

Source of the idea: soft thresholding of an estimate towards the middle of its group, as in James-Stein shrinkage.

Owns: that pooling, of models and of prefill rates.
Does not: fit models (cluster.core.step_time, in the worker), estimate (estimated_ttft), or read heartbeats.
Invariants: equal models come back unchanged; what comes back is finite and >= 0; nothing is kept of a worker after
`keep_only` without it. Pure arithmetic; times are of one monotonic clock, which the caller reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cluster.core.replica import WorkerId
from cluster.core.step_time import StepShape, StepTimeModel

_IGNORED, _FULL = math.log(1.25), math.log(2.0)
_HALF_LIFE_S = 15.0  # of what a replica said of itself last, if it says nothing new
_EVERY_S = 1.0  # between two looks at what has faded
_LEAST_NEWS = 1e-9
_ABSURD_S = 1e6  # no step takes so long: such a model is not pooled
_TYPICAL = (StepShape(256, 256 * 512.0, 4, 4 * 1024), StepShape(0, 0.0, 4, 4 * 1024))  # by which models are compared


class Speed(NamedTuple):
    """What counts.  prefill_tokens_per_s: 0 while unknown, or where there is a step_time."""

    prefill_tokens_per_s: float = 0.0
    step_time: StepTimeModel | None = None


class _Told(NamedTuple):
    """at: when a replica first said so."""

    rate: float
    model: StepTimeModel | None
    rate_at: float
    model_at: float


UNKNOWN = Speed()


class FleetSpeed:
    def __init__(self) -> None:
        self._told: dict[WorkerId, _Told] = {}
        self._pooled: dict[WorkerId, Speed] = {}
        self._pooled_at = -math.inf

    def tell(self, worker_id: WorkerId, rate: float, model: StepTimeModel | None, now: float) -> None:
        """What its heartbeat says now.  rate: of prefill, in tokens per second, 0 while unknown."""
        before = self._told.get(worker_id)
        if before is None:
            self._told[worker_id] = _Told(rate, model, now, now)
            self._pooled_at = -math.inf
        elif (rate, model) != (before.rate, before.model):
            rate_at = before.rate_at if rate == before.rate else now
            if model != before.model or model is None:  # nobody asks for rates where there are models
                self._pooled_at = -math.inf
            self._told[worker_id] = _Told(rate, model, rate_at, before.model_at if model == before.model else now)

    def of(self, worker_id: WorkerId, now: float) -> Speed:
        if now - self._pooled_at >= _EVERY_S:
            self._pooled = self._pool(now)
            self._pooled_at = now
        return self._pooled.get(worker_id, UNKNOWN)

    def keep_only(self, worker_ids: Iterable[WorkerId]) -> None:
        for worker_id in self._told.keys() - set(worker_ids):
            del self._told[worker_id]
            self._pooled_at = -math.inf

    def _pool(self, now: float) -> dict[WorkerId, Speed]:
        models = {worker_id: told.model for worker_id, told in self._told.items() if told.model is not None}
        if models:
            news = {worker_id: _news(now - self._told[worker_id].model_at) for worker_id in models}
            pooled, middle = _pooled_models(models, news)
            return {worker_id: Speed(0.0, pooled.get(worker_id, middle)) for worker_id in self._told}
        rates = {worker_id: told.rate for worker_id, told in self._told.items() if told.rate > 0}
        news = {worker_id: _news(now - self._told[worker_id].rate_at) for worker_id in rates}
        return {worker_id: Speed(rate, None) for worker_id, rate in _shrunk(rates, news)[0].items()}


def _news(age_s: float) -> float:
    return max(math.exp2(-max(age_s, 0.0) / _HALF_LIFE_S), _LEAST_NEWS)


def _pooled_models(
    models: Mapping[WorkerId, StepTimeModel], news: Mapping[WorkerId, float]
) -> tuple[dict[WorkerId, StepTimeModel], StepTimeModel | None]:
    """Each worker's, and that of the middle of the fleet."""
    first = next(iter(models.values()), None)
    if first is None or all(model == first for model in models.values()):
        return dict(models), first
    times = {worker_id: sum(map(model.seconds, _TYPICAL)) for worker_id, model in models.items()}
    usable = {worker_id: seconds for worker_id, seconds in times.items() if 0 < seconds < _ABSURD_S}
    if not usable:
        return dict(models), None
    total = math.fsum(news[worker_id] for worker_id in usable)
    form = [0.0] * 5  # of one second of typical steps
    for worker_id, seconds in usable.items():
        for place, coefficient in enumerate(models[worker_id].to_wire()):
            form[place] += news[worker_id] / total * coefficient / seconds

    def of(seconds: float) -> StepTimeModel:
        return StepTimeModel(*(seconds * one for one in form))

    shrunk, middle = _shrunk(usable, news)
    counted = {worker_id: of(seconds) for worker_id, seconds in shrunk.items()}
    return {worker_id: counted.get(worker_id, model) for worker_id, model in models.items()}, of(middle)


def _shrunk(values: Mapping[WorkerId, float], news: Mapping[WorkerId, float]) -> tuple[dict[WorkerId, float], float]:
    """Each value with that part of its distance from the fleet's middle which is news and more than noise; the middle.

    The middle of none is 0."""
    if len(set(values.values())) < 2:
        return dict(values), next(iter(values.values()), 0.0)
    logs = {worker_id: math.log(value) for worker_id, value in values.items()}
    middle = _weighted_median([(logs[worker_id], news[worker_id]) for worker_id in logs])
    shrunk = {w: math.exp(middle + _counted(news[w] * (one - middle))) for w, one in logs.items()}
    return shrunk, math.exp(middle)


def _weighted_median(weighted: Iterable[tuple[float, float]]) -> float:
    """Of (value, weight > 0), interpolated, so that it moves smoothly while weights fade."""
    ordered = sorted(weighted)
    half = math.fsum(weight for _, weight in ordered) / 2
    passed, last_value, last_place = 0.0, ordered[0][0], 0.0
    for value, weight in ordered:
        place = passed + weight / 2
        if place >= half:
            share = (half - last_place) / (place - last_place) if last_place else 1.0
            return last_value + share * (value - last_value)
        passed, last_value, last_place = passed + weight, value, place
    return last_value


def _counted(distance: float) -> float:
    size = abs(distance)
    if size >= _FULL:
        return distance
    if size <= _IGNORED:
        return 0.0
    return math.copysign(_FULL * (size - _IGNORED) / (_FULL - _IGNORED), distance)
