"""ReplicaPace: how much longer a replica takes than its own step-time model says, beside the other replicas.

A replica's model comes with its heartbeats and learns slowly. When its machine becomes slow, first tokens tell sooner:

    estimated compute of what it answered    0.4  0.4  0.4      1.2 s, and the usual error of the others: 1.1
    from one first token to the next         1.3  1.3  1.3      3.9 s -> 3.9 / (1.2 * 1.1) = 3.0, less the prior

Owns: these sums, how they fade, and from when on they count.
Does not: measure (router.own_work) or use the pace (router.routing_state).
Invariants: 1 unless a replica is slower than the others by more than `SLOWER` on enough work; never above `MOST`;
without news it goes back to 1, so that whoever was avoided is tried again; nothing is kept after `forget`.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.replica import WorkerId

SLOWER = 1.8  # times the others' time: less is noise, the wait for the step that runs, and decode rows
MOST = 8.0
HALF_LIFE_S = 15.0
_PRIOR_ANSWERS = 1.5  # answers of usual size that took as long as estimated, so that one late answer says little
_NEWEST_SHARE = 0.02  # of the newest answer in what is usual


@dataclass(slots=True, eq=False)
class _Sums:
    """Seconds, faded until `at`.  others_error: of the other replicas, when this one answered last."""

    at: float
    observed: float = 0.0
    expected: float = 0.0
    others_error: float = 1.0
    slow: bool = False

    def fade(self, now: float) -> None:
        if now > self.at:
            share = 0.5 ** ((now - self.at) / HALF_LIFE_S)
            self.observed *= share
            self.expected *= share
            self.at = now


class ReplicaPace:
    """Times are of one monotonic clock, which the caller reads."""

    def __init__(self) -> None:
        self._sums: dict[WorkerId, _Sums] = {}
        self._all = _Sums(0.0)
        self._usual_s = 0.0  # estimated compute of one answer

    def answered(self, worker_id: WorkerId, expected_s: float, observed_s: float, now: float) -> None:
        """A prompt that should take `expected_s` kept the replica busy for `observed_s`."""
        if expected_s <= 0.0:
            return
        sums = self._sums.setdefault(worker_id, _Sums(now))
        for one in (sums, self._all):
            one.fade(now)
            one.observed += observed_s
            one.expected += expected_s
        self._usual_s += (_NEWEST_SHARE if self._usual_s else 1.0) * (expected_s - self._usual_s)
        others = self._all.expected - sums.expected
        sums.others_error = max((self._all.observed - sums.observed) / others, 1.0) if others > self._usual_s else 1.0
        sums.slow = self._pace(sums, 0.0, 0.0) >= SLOWER

    def of(self, worker_id: WorkerId, now: float, running_s: float = 0.0, running_expected_s: float = 0.0) -> float:
        """`running_s`: how long the prompt that it computes now has taken already, if that is long."""
        sums = self._sums.get(worker_id)
        if sums is None or not (sums.slow or running_s):
            return 1.0  # fading moves nobody away from 1
        sums.fade(now)
        pace = self._pace(sums, running_s, running_expected_s)
        return 1.0 if pace < SLOWER else min(pace, MOST)

    def forget(self, worker_id: WorkerId) -> None:
        sums = self._sums.pop(worker_id, None)
        if sums is not None:
            sums.fade(self._all.at)
            self._all.observed = max(self._all.observed - sums.observed, 0.0)
            self._all.expected = max(self._all.expected - sums.expected, 0.0)

    def _pace(self, sums: _Sums, running_s: float, running_expected_s: float) -> float:
        prior = _PRIOR_ANSWERS * self._usual_s
        observed = (sums.observed + running_s) / sums.others_error
        return (observed + prior) / (sums.expected + running_expected_s + prior)
