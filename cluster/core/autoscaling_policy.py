"""AutoscalingPolicy: how many replicas a deployment should have, from what its replicas report.

    work     seconds of prefill that arrive per second, over the look-back window and, if they grow by more than chance,
             as many as there will be when a replica that is asked for now is ready; divided by the share of time to be
             busy
    queue    what will wait then, with what starts already, for longer than the TTFT target, is computed within it; for
             that at most as many as serve now
    memory   KV held by live requests, and their seats, at most so full
    ttft     when more than a tenth of the requests miss the TTFT target, up to half as many again as `work` says

The most of these is wanted; it counts all replicas, those that still start included, so nothing is asked for twice.

    wanted        4  5  5  7  6  7  7  3  4  3  3  3
    up            the least wanted of the last `up_delay_s`
    down          the most wanted of the last `down_delay_s`, only if that is clearly less than what there is, and not
                  before what was asked for last has come: until then nobody knows whether it was enough
    target        4  4  5  5  6  6  7  7  7  7  7  4

Owns: this arithmetic, its memory of the past, and the way to zero and back.
Does not: know Ray Serve (cluster.autoscaling), or which replica goes.
Invariants: the answer is within the bounds; without news it stays; a replica that tells nothing counts like the mean of
the others; a call costs a few microseconds per replica, and most calls nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cluster.core.replica_demand import ReplicaDemand
from cluster.core.window_extreme import WindowExtreme

_EVERY_S = 1.0  # between two looks
_ROUNDING = 0.05  # of a replica: nobody is started for less
_LEAST_WINDOW_S = 5.0  # of history, before a rate is believed
_CLEARLY = 1.1  # going down needs so much more room than coming up did
_MOST_GROWTH = 3.0  # of the work until a new replica is ready, at most
_TTFT_HELP = 1.5
_LATE_SHARE = 0.1  # may miss the TTFT target
_FEWEST_FOR_TTFT = 0.3  # of `utilisation`; below it waiting is not for want of replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingParameters:
    """As AutoscalingConfig, which has the defaults and says what each means."""

    min_replicas: int
    max_replicas: int
    ttft_target_s: float
    utilisation: float
    memory_use: float
    look_back_s: float
    up_delay_s: float
    down_delay_s: float
    to_zero_delay_s: float
    start_s: float


class Fleet(NamedTuple):
    """replicas: of those that serve, by id, None where one tells nothing.  target: asked for, some may still start.

    queued_requests: that no replica has taken yet.
    """

    replicas: Mapping[str, ReplicaDemand | None]
    target: int
    queued_requests: float


class _Sample(NamedTuple):
    """Sums since the beginning, so that two samples give the mean between them.

    squares: of the work between two looks.  memory: in replicas.
    """

    at_s: float
    looks: int = 0
    work_s: float = 0.0
    squares: float = 0.0
    memory: float = 0.0
    answered: float = 0.0
    late: float = 0.0


class AutoscalingPolicy:
    """`decide` with a clock's seconds that never go back."""

    def __init__(self, parameters: ScalingParameters) -> None:
        self._parameters = parameters
        self._keep_s = max(parameters.start_s, 2 * parameters.look_back_s) + 2 * _EVERY_S
        self._decided_at = -math.inf
        self._busy_at = math.inf
        self._asked_at = -math.inf
        self._forget()

    def due(self, now: float) -> bool:
        """Whether `decide` would look at the replicas."""
        return now - self._decided_at >= _EVERY_S

    def decide(self, now: float, fleet: Fleet) -> int:
        """How many replicas there should be; those that start count."""
        if not fleet.target and fleet.queued_requests > 0:
            return self._bounded(1)
        if not self.due(now):
            return self._bounded(fleet.target)
        self._decided_at = now
        known = {name: demand for name, demand in fleet.replicas.items() if demand is not None}
        self._note_idleness(now, fleet, known)
        if not known:  # nothing runs, or nobody tells anything
            self._forget()
            return self._bounded(fleet.target)
        running = len(fleet.replicas)
        self._observe(now, known, running / len(known))
        if now - self._samples[0].at_s < min(_LEAST_WINDOW_S, self._parameters.look_back_s):
            return self._bounded(fleet.target)
        backlog_s = running / len(known) * math.fsum(demand.queued_s for demand in known.values())
        return self._bounded(self._settled(now, self._wanted(now, fleet, backlog_s), fleet.target))

    def _forget(self) -> None:
        """The past says nothing about what comes after a gap."""
        self._before: dict[str, ReplicaDemand] = {}
        self._samples: list[_Sample] = []
        self._least = WindowExtreme(self._parameters.up_delay_s)
        self._most = WindowExtreme(self._parameters.down_delay_s)
        self._wanted_since: float | None = None

    def _note_idleness(self, now: float, fleet: Fleet, known: Mapping[str, ReplicaDemand]) -> None:
        busy = fleet.queued_requests > 0 or len(known) < len(fleet.replicas)
        busy = busy or any(
            demand.seat_share or demand.queued_s or demand.loaded_s != self._before.get(name, demand).loaded_s
            for name, demand in known.items()
        )
        if busy or self._busy_at == math.inf or not fleet.replicas:
            self._busy_at = now

    def _observe(self, now: float, known: Mapping[str, ReplicaDemand], silent: float) -> None:
        """What came since the last look: what was computed, and what the queues grew by. `silent`: a factor."""
        came = answered = late = 0.0
        for name, demand in known.items():
            before = self._before.get(name)
            if before is None:
                came += demand.queued_s
            elif demand.loaded_s >= before.loaded_s and demand.answered >= before.answered:
                came += demand.loaded_s - before.loaded_s + demand.queued_s - before.queued_s
                answered += demand.answered - before.answered
                late += demand.late - before.late
        came *= silent
        self._before = known if isinstance(known, dict) else dict(known)
        memory = silent * math.fsum(max(demand.kv_share, demand.seat_share) for demand in known.values())
        last = self._samples[-1] if self._samples else _Sample(now)
        self._samples.append(
            _Sample(
                now,
                last.looks + 1,
                last.work_s + came,
                last.squares + came * came,
                last.memory + memory,
                last.answered + answered,
                last.late + late,
            )
        )
        if self._samples[0].at_s < now - 2 * self._keep_s:  # rarely, because the rest moves up
            del self._samples[: bisect_right(self._samples, now - self._keep_s, key=_at) - 1]

    def _wanted(self, now: float, fleet: Fleet, backlog_s: float) -> float:
        parameters, running = self._parameters, len(fleet.replicas)
        first, last = self._sample_at(now - parameters.look_back_s), self._samples[-1]
        looks = last.looks - first.looks
        rate = _rate(first, last)
        ahead = self._rate_ahead(now, rate)
        work = ahead / parameters.utilisation
        if rate >= _FEWEST_FOR_TTFT * parameters.utilisation * running:  # else they are slow for another reason
            late = last.late - first.late
            share = (late - math.sqrt(late)) / max(last.answered - first.answered, 1.0)
            work *= min(max(share / _LATE_SHARE, 1.0), _TTFT_HELP)
        while_starting = (rate + ahead - running - fleet.target) / 2 * parameters.start_s
        left_s = max(backlog_s + while_starting - parameters.ttft_target_s * running, 0.0)
        queue = ahead + min(left_s / parameters.ttft_target_s, float(running))
        memory = (last.memory - first.memory) / looks / parameters.memory_use
        return max(work, queue, memory)

    def _rate_ahead(self, now: float, rate: float) -> float:
        """The work per second when a replica that is asked for now is ready, if it grows as it has lately."""
        start_s, look_back_s = self._parameters.start_s, self._parameters.look_back_s
        half_s = min(max(start_s / 4, look_back_s), (now - self._samples[0].at_s) / 2)
        if half_s < look_back_s / 2 or not start_s:
            return rate
        oldest, middle, last = self._sample_at(now - 2 * half_s), self._sample_at(now - half_s), self._samples[-1]
        growth = (_rate(middle, last) - _rate(oldest, middle)) / half_s
        chance = math.hypot(_chance(oldest, middle), _chance(middle, last)) / half_s
        return min(rate + max(growth - chance, 0.0) * (start_s + look_back_s / 2), _MOST_GROWTH * rate)

    def _sample_at(self, at_s: float) -> _Sample:
        """The newest one not after `at_s`, or the oldest there is; never the last."""
        place = bisect_right(self._samples, at_s, hi=len(self._samples) - 1, key=_at)
        return self._samples[max(place - 1, 0)]

    def _settled(self, now: float, wanted: float, target: int) -> int:
        """`target`, or what all of the last while agrees on."""
        parameters = self._parameters
        if self._wanted_since is None:
            self._wanted_since = now
        least, most = -self._least.push(now, -wanted), self._most.push(now, wanted)
        covered_s = now - self._wanted_since
        up = math.ceil(least - _ROUNDING)
        if up > target and covered_s >= parameters.up_delay_s:
            self._asked_at = now
            return up
        if covered_s < parameters.down_delay_s or now - self._asked_at < parameters.start_s:
            return target
        if not parameters.min_replicas and now - self._busy_at >= parameters.to_zero_delay_s:
            return 0
        return min(target, max(math.ceil(most * _CLEARLY - _ROUNDING), 1))

    def _bounded(self, replicas: int) -> int:
        return min(max(replicas, self._parameters.min_replicas), self._parameters.max_replicas)


def _at(sample: _Sample) -> float:
    return sample.at_s


def _rate(first: _Sample, last: _Sample) -> float:
    return max(last.work_s - first.work_s, 0.0) / max(last.at_s - first.at_s, _EVERY_S)


def _chance(first: _Sample, last: _Sample) -> float:
    """The standard deviation of that rate, if requests come independently of each other."""
    work_s = last.work_s - first.work_s
    variance = last.squares - first.squares - work_s * work_s / (last.looks - first.looks)
    return math.sqrt(max(variance, 0.0)) / max(last.at_s - first.at_s, _EVERY_S)
