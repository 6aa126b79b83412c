"""ElasticFleet: a fleet whose number of replicas a scaler decides, in virtual time.

    the scaler wants one more   it is paid for at once, joins with an empty cache `start_s` later
    one fewer                   one that still starts is given up, or the oldest gets no more requests, finishes what it
                                has, and goes; Serve stops the oldest, too, where every replica has a node of its own
    nobody serves               requests wait until somebody does

Owns: when replicas come and go, what is paid, and what the scaler hears: what replicas report once per second.
Does not: decide how many (Scaler), choose for requests, or make statistics.
Invariants: as FleetSimulation; no request is lost to a replica that goes; `paid_s` is the time from when a replica was
asked for until it is gone, added up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

from cluster.core.hashing import ChunkHash
from cluster.core.replica_demand import ReplicaDemand, demand_of
from cluster.simulate.fleet_simulation import FleetResult, FleetSettings, FleetSimulation, Member
from cluster.simulate.mooncake_trace import TraceRequest
from cluster.simulate.policy_lineup import PolicyEntry
from worker.late_answers import LateAnswers

TICK_S = 1.0


class FleetState(NamedTuple):
    """demands: of the replicas that serve.  queued: requests that none of them has taken.

    ongoing: theirs and the queued ones.
    """

    demands: Mapping[str, ReplicaDemand]
    target: int
    queued: int
    ongoing: int


class Scaler(Protocol):
    """Asked once per `TICK_S`: how many replicas there should be, those that start included."""

    def decide(self, now: float, state: FleetState) -> int: ...


class Census(NamedTuple):
    at_s: float
    serving: int
    starting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticResult:
    """census: one entry per change.  turns: how often the target's direction changed."""

    fleet: FleetResult
    paid_s: float
    census: list[Census]
    targets: list[tuple[float, int]]

    @property
    def turns(self) -> int:
        steps = [later - earlier for (_, earlier), (_, later) in pairwise(self.targets)]
        return sum(one * other < 0 for one, other in pairwise(steps))


@dataclass(slots=True, eq=False)
class _Life:
    asked_s: float
    late: LateAnswers
    gone_s: float | None = None
    draining: bool = False


class ElasticFleet(FleetSimulation):
    """`settings.replicas` serve from the beginning.  ttft_target_s: what later than that comes is late."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        settings: FleetSettings,
        entry: PolicyEntry,
        scaler: Scaler,
        *,
        start_s: float,
        ttft_target_s: float | None = None,
        hashes: dict[str, tuple[ChunkHash, ...]] | None = None,
        timer: Callable[[], float] = lambda: 0.0,
    ) -> None:
        super().__init__(requests, settings, entry, hashes=hashes, timer=timer)
        self._scaler = scaler
        self._start_s = start_s
        self._ttft_target_s = ttft_target_s
        self._lives = {member.worker_id: self._new_life() for member in self._members}
        self._starting: list[Member] = []
        self._queued: list[TraceRequest] = []
        self._target = settings.replicas
        self._targets = [(0.0, self._target)]
        self._census = [Census(0.0, self._target, 0)]

    def run_elastic(self) -> ElasticResult:
        self._at(0.0, self._tick)
        fleet = self.run()
        end_s = self._clock.now
        paid_s = sum((end_s if life.gone_s is None else life.gone_s) - life.asked_s for life in self._lives.values())
        return ElasticResult(fleet=fleet, paid_s=paid_s, census=self._census, targets=self._targets)

    def _new_life(self) -> _Life:
        return _Life(self._clock.now, LateAnswers(self._ttft_target_s))

    def _tick(self) -> None:
        now = self._clock.now
        live = sum(member.replica.num_live for member in self._members)
        if self._arrived == len(self._requests) and not live and not self._queued:
            return
        demands = {str(worker_id): self._demand(self._by_id[worker_id][1]) for worker_id in self._alive}
        queued = len(self._queued)
        ongoing = queued + sum(self._by_id[worker_id][1].replica.num_live for worker_id in self._alive)
        wanted = self._scaler.decide(now, FleetState(demands, self._target, queued, ongoing))
        if wanted != self._target:
            self._scale(wanted - self._target)
            self._target = wanted
            self._targets.append((now, wanted))
        self._at(now + TICK_S, self._tick)

    def _demand(self, member: Member) -> ReplicaDemand:
        settings, late = self._settings.replica, self._lives[member.worker_id].late
        return demand_of(
            member.replica.load(),
            token_budget=settings.token_budget,
            max_num_seqs=settings.max_num_seqs,
            block_size=settings.block,
            answered=late.answered,
            late=late.late,
        )

    def _scale(self, change: int) -> None:
        now = self._clock.now
        for _ in range(change):
            member = self._new_member()
            self._lives[member.worker_id] = self._new_life()
            self._starting.append(member)
            self._at(now + self._start_s, lambda member=member: self._join(member))  # type: ignore[misc]
        for _ in range(-change):
            if self._starting:
                self._lives[self._starting.pop().worker_id].gone_s = now
            else:
                self._drain(self._by_id[self._alive.pop(0)][1])
        self._count()

    def _join(self, member: Member) -> None:
        if member not in self._starting:
            return
        self._starting.remove(member)
        self._alive.append(member.worker_id)
        self.router.join(member.worker_id, member.replica)
        self._count()
        queued, self._queued = self._queued, []
        for request in queued:
            self._send(request)

    def _send(self, request: TraceRequest) -> None:
        if self._alive:
            super()._send(request)
        else:
            self._queued.append(request)

    def _drain(self, member: Member) -> None:
        self._lives[member.worker_id].draining = True
        self._leave_if_done(member)

    def _end_step(self, member: Member, due: int) -> None:
        super()._end_step(member, due)
        if self._lives[member.worker_id].draining:
            self._leave_if_done(member)

    def _leave_if_done(self, member: Member) -> None:
        if not member.alive or member.replica.num_live:
            return
        member.alive = False
        self._lives[member.worker_id].gone_s = self._clock.now
        self.router.leave(member.worker_id, self._alive)
        self._count()

    def _first_token(self, member: Member, request_id: str, cached: int) -> None:
        super()._first_token(member, request_id, cached)
        ttft_s = self._records[request_id].ttft_s
        assert ttft_s is not None
        self._lives[member.worker_id].late.note(ttft_s)

    def _count(self) -> None:
        self._census.append(Census(self._clock.now, len(self._alive), len(self._starting)))
