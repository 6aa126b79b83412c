"""FleetSpeed: the replicas' speeds without the noise of measuring each alone.

Every replica fits its own step-time model, and two equal machines never report the same one. Taken as it is, the
difference sends every lone request to whoever looks a little faster, while the others idle. So all models are pooled to
one form, and a replica keeps a factor of its own only as far as it stands out:

    factor by which its steps are slower   1.0 .. 1.25   1.5   2 and above     (and the same below 1)
    what counts of it                      1.0           1.31  all of it

One that has no model yet, because it is new, is taken for one of the middle.

Source of the idea: soft thresholding of an estimate towards the mean of its group, as in James-Stein shrinkage.

Owns: that pooling, of models and of prefill rates.
Does not: fit models (cluster.core.step_time, in the worker), estimate (estimated_ttft), or read heartbeats.
Invariants: equal models come back unchanged; what comes back is finite and >= 0; worked out again only when something
was told; nothing is kept of a worker after `keep_only` without it. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple

from cluster.core.replica import WorkerId
from cluster.core.step_time import StepShape, StepTimeModel

_IGNORED, _FULL = math.log(1.25), math.log(2.0)
_ABSURD_S = 1e6  # no step takes so long: such a model is not pooled
_TYPICAL = (StepShape(256, 256 * 512.0, 4, 4 * 1024), StepShape(0, 0.0, 4, 4 * 1024))  # by which models are compared


class Speed(NamedTuple):
    """What counts.  prefill_tokens_per_s: 0 while unknown, or where there is a step_time."""

    prefill_tokens_per_s: float = 0.0
    step_time: StepTimeModel | None = None


UNKNOWN = Speed()


class FleetSpeed:
    def __init__(self) -> None:
        self._rates: dict[WorkerId, float] = {}
        self._models: dict[WorkerId, StepTimeModel] = {}
        self._pooled: dict[WorkerId, Speed] | None = {}

    def tell(self, worker_id: WorkerId, prefill_tokens_per_s: float, step_time: StepTimeModel | None) -> None:
        """What its heartbeat says now.  prefill_tokens_per_s: 0 while unknown."""
        if step_time is not None:
            if self._models.get(worker_id) != step_time:
                self._models[worker_id] = step_time
                self._pooled = None
        elif self._models.pop(worker_id, None) is not None:
            self._pooled = None
        if self._rates.get(worker_id) != prefill_tokens_per_s:
            if worker_id not in self._rates or not self._models:  # nobody asks for rates where there are models
                self._pooled = None
            self._rates[worker_id] = prefill_tokens_per_s

    def of(self, worker_id: WorkerId) -> Speed:
        if self._pooled is None:
            self._pooled = self._pool()
        return self._pooled.get(worker_id, UNKNOWN)

    def keep_only(self, worker_ids: Iterable[WorkerId]) -> None:
        gone = self._rates.keys() - set(worker_ids)
        for worker_id in gone:
            del self._rates[worker_id]
            self._models.pop(worker_id, None)
            self._pooled = None

    def _pool(self) -> dict[WorkerId, Speed]:
        if not self._models:
            known = {worker_id: rate for worker_id, rate in self._rates.items() if rate > 0}
            return {worker_id: Speed(rate, None) for worker_id, rate in _shrunk(known).items()}
        pooled, middle = _pooled_models(self._models)
        return {worker_id: Speed(0.0, pooled.get(worker_id, middle)) for worker_id in self._rates}


def _pooled_models(
    models: Mapping[WorkerId, StepTimeModel],
) -> tuple[dict[WorkerId, StepTimeModel], StepTimeModel | None]:
    """Each worker's, and that of the middle of the fleet."""
    first = next(iter(models.values()), None)
    if first is None or all(model == first for model in models.values()):
        return dict(models), first
    times = {worker_id: sum(map(model.seconds, _TYPICAL)) for worker_id, model in models.items()}
    usable = {worker_id: seconds for worker_id, seconds in times.items() if 0 < seconds < _ABSURD_S}
    if not usable:
        return dict(models), None
    form = [0.0] * 5  # of one second of typical steps
    for worker_id, seconds in usable.items():
        for place, coefficient in enumerate(models[worker_id].to_wire()):
            form[place] += coefficient / seconds / len(usable)

    def of(seconds: float) -> StepTimeModel:
        return StepTimeModel(*(seconds * one for one in form))

    counted = {worker_id: of(seconds) for worker_id, seconds in _shrunk(usable).items()}
    return {w: counted.get(w, model) for w, model in models.items()}, of(median(usable.values()))


def _shrunk(values: Mapping[WorkerId, float]) -> dict[WorkerId, float]:
    """Each value with that part of its distance from the fleet's middle which is more than noise."""
    logs = {worker_id: math.log(value) for worker_id, value in values.items()}
    if len(set(values.values())) < 2:
        return dict(values)
    middle = median(logs.values())
    return {worker_id: math.exp(middle + _counted(one - middle)) for worker_id, one in logs.items()}


def _counted(distance: float) -> float:
    size = abs(distance)
    if size >= _FULL:
        return distance
    if size <= _IGNORED:
        return 0.0
    return math.copysign(_FULL * (size - _IGNORED) / (_FULL - _IGNORED), distance)
