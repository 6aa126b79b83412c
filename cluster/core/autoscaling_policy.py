"""AutoscalingPolicy: how many replicas a deployment should have, from what its replicas report.

    work     seconds of prefill that arrive per second, over the look-back window and, if they grow, as many as there
             will be when a replica that is asked for now is ready; divided by the share of time to be busy
    queue    what waits, so that it is computed within the TTFT target
    memory   KV held by live requests, and their seats, at most so full
    ttft     when the measured TTFT misses its target, up to half as many again as `work` says

The most of these is wanted; it counts all replicas, those that still start included, so nothing is asked for twice.

    wanted        4  5  5  7  6  7  7  3  4  3  3  3
    up            the least wanted of the last `up_delay_s`
    down          the most wanted of the last `down_delay_s`, and only if that is clearly less than what there is
    target        4  4  5  5  6  6  7  7  7  7  7  4

Owns: this arithmetic, its memory of the past, and the way to zero and back.
Does not: know Ray Serve (cluster.autoscaling), or which replica goes.
Invariants: the answer is within the bounds; without news it stays; a replica that tells nothing counts like the mean of
the others; a call costs a few microseconds per replica, and most calls nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cluster.core.replica_demand import ReplicaDemand

_EVERY_S = 1.0  # between two looks
_LEAST_WINDOW_S = 5.0  # of history, before a rate is believed
_CLEARLY = 1.1  # going down needs so much more room than coming up did
_MOST_GROWTH = 2.0  # of the work until a new replica is ready, at most
_TTFT_HELP = 1.5
_QUEUE_HELP = 2.0  # times what runs; a longer queue says no more than this one does
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
    at_s: float
    work_s: float  # that has come since the beginning
    memory: float  # in replicas
    ttft_s: float


class AutoscalingPolicy:
    """`decide` with a clock's seconds that never go back."""

    def __init__(self, parameters: ScalingParameters) -> None:
        self._parameters = parameters
        self._keep_s = max(2 * parameters.start_s, parameters.look_back_s)
        self._before: dict[str, ReplicaDemand] = {}
        self._work_s = 0.0
        self._samples: deque[_Sample] = deque()
        self._wanted: deque[tuple[float, float]] = deque()
        self._decided_at = -math.inf
        self._busy_at = math.inf
        self._backlog_s = 0.0

    def due(self, now: float) -> bool:
        """Whether `decide` would look at the replicas."""
        return now - self._decided_at >= _EVERY_S

    def decide(self, now: float, fleet: Fleet) -> int:
        """How many replicas there should be; those that start count."""
        parameters = self._parameters
        if not fleet.target and fleet.queued_requests > 0:
            return self._bounded(1)
        if not self.due(now):
            return self._bounded(fleet.target)
        self._decided_at = now
        known = {name: demand for name, demand in fleet.replicas.items() if demand is not None}
        self._note_idleness(now, fleet, known)
        if not known:  # nothing runs, or nobody tells anything
            self._before = {}
            return self._bounded(fleet.target)
        self._observe(now, known, len(fleet.replicas))
        if now - self._samples[0].at_s < min(_LEAST_WINDOW_S, parameters.look_back_s):
            return self._bounded(fleet.target)
        self._wanted.append((now, self._replicas_wanted(now, len(fleet.replicas))))
        return self._bounded(self._settled(now, fleet.target))

    def _note_idleness(self, now: float, fleet: Fleet, known: Mapping[str, ReplicaDemand]) -> None:
        busy = fleet.queued_requests > 0 or len(known) < len(fleet.replicas)
        busy = busy or any(
            demand.seat_share or demand.queued_s or demand.loaded_s != self._before.get(name, demand).loaded_s
            for name, demand in known.items()
        )
        if busy or self._busy_at == math.inf or not fleet.replicas:
            self._busy_at = now

    def _observe(self, now: float, known: Mapping[str, ReplicaDemand], running: int) -> None:
        """What came since the last look: what was computed, and what the queues grew by."""
        came = 0.0
        for name, demand in known.items():
            before = self._before.get(name)
            if before is not None and demand.loaded_s >= before.loaded_s:
                came += demand.loaded_s - before.loaded_s + demand.queued_s - before.queued_s
            elif before is None:
                came += demand.queued_s
        silent = running / len(known)
        self._work_s += came * silent
        self._before = dict(known)
        self._backlog_s = silent * sum(demand.queued_s for demand in known.values())
        memory = silent * sum(max(demand.kv_share, demand.seat_share) for demand in known.values())
        times = [demand.ttft_s for demand in known.values() if demand.ttft_s > 0]
        self._samples.append(_Sample(now, self._work_s, memory, sum(times) / len(times) if times else 0.0))
        while self._samples[0].at_s < now - self._keep_s - _EVERY_S:
            self._samples.popleft()

    def _replicas_wanted(self, now: float, running: int) -> float:
        parameters = self._parameters
        rate = self._rate(now - parameters.look_back_s, now)
        work = self._rate_ahead(now, rate) / parameters.utilisation
        queue = min(self._backlog_s / parameters.ttft_target_s, _QUEUE_HELP * running)
        recent = [sample for sample in self._samples if sample.at_s >= now - parameters.look_back_s]
        memory = math.fsum(sample.memory for sample in recent) / len(recent) / parameters.memory_use
        return max(work * self._ttft_help(recent, rate, running), queue, memory)

    def _ttft_help(self, recent: list[_Sample], rate: float, running: int) -> float:
        """A factor. Replicas that are hardly busy are slow for other reasons than their number."""
        parameters = self._parameters
        if rate < _FEWEST_FOR_TTFT * parameters.utilisation * running:
            return 1.0
        ttft_s = math.fsum(sample.ttft_s for sample in recent) / len(recent)
        return min(max(ttft_s / parameters.ttft_target_s, 1.0), _TTFT_HELP)

    def _rate_ahead(self, now: float, rate: float) -> float:
        """The work per second when a replica that is asked for now is ready, if it grows as it has lately."""
        horizon_s, half_s = self._parameters.start_s, max(self._parameters.start_s, self._parameters.look_back_s) / 2
        if now - self._samples[0].at_s < 2 * half_s or not horizon_s:
            return rate
        middle = now - half_s
        newer, older = self._rate(middle, now), self._rate(middle - half_s, middle)
        growth = max(newer - older, 0.0) / half_s
        return max(rate, min(newer + growth * (horizon_s + half_s / 2), _MOST_GROWTH * newer))

    def _rate(self, since: float, until: float) -> float:
        first, last = self._sample_at(since), self._sample_at(until)
        return max(last.work_s - first.work_s, 0.0) / max(last.at_s - first.at_s, _EVERY_S)

    def _sample_at(self, at_s: float) -> _Sample:
        """The newest one not after `at_s`, or the oldest there is."""
        low, high = 0, len(self._samples)
        while low < high:
            middle = (low + high) // 2
            if self._samples[middle].at_s <= at_s:
                low = middle + 1
            else:
                high = middle
        return self._samples[max(low - 1, 0)]

    def _settled(self, now: float, target: int) -> int:
        """`target`, or what all of the last while agrees on."""
        parameters = self._parameters
        while self._wanted[0][0] < now - max(parameters.up_delay_s, parameters.down_delay_s) - _EVERY_S:
            self._wanted.popleft()
        least = most = self._wanted[-1][1]
        for at_s, wanted in reversed(self._wanted):
            if at_s >= now - parameters.up_delay_s:
                least = min(least, wanted)
            if at_s >= now - parameters.down_delay_s:
                most = max(most, wanted)
        covered = self._wanted[-1][0] - self._wanted[0][0] + _EVERY_S
        if math.ceil(least) > target and covered >= parameters.up_delay_s:
            return math.ceil(least)
        if covered < parameters.down_delay_s:
            return target
        if not parameters.min_replicas and now - self._busy_at >= parameters.to_zero_delay_s:
            return 0
        return min(target, max(math.ceil(most * _CLEARLY), 1))

    def _bounded(self, replicas: int) -> int:
        return min(max(replicas, self._parameters.min_replicas), self._parameters.max_replicas)
