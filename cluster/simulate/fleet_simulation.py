"""FleetSimulation: a trace on several replicas behind one router, in virtual time.

    a request comes     FleetRouter chooses and books; the replica queues it
    steps end           first tokens and ends go to the router at once, cache events `event_lag_s` later
    a replica dies      requests without a first token are routed again, the others have failed

Owns: the order of what happens, and what became of each request.
Does not: choose, schedule, or make statistics (fleet_report).
Invariants: the same requests, settings and policy give the same result bit for bit; it ends when nothing is left.
"""

from __future__ import annotations

import heapq
import itertools
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.core.errors import ConfigError
from cluster.core.events import CacheEvent
from cluster.core.hashing import ChunkHash, hash_prompt, root_hash
from cluster.core.replica import WorkerId
from cluster.simulate.fleet_router import ROUTER_ID, FleetRouter
from cluster.simulate.mooncake_trace import TraceRequest
from cluster.simulate.policy_lineup import PolicyEntry
from cluster.simulate.scaled_replica import SCHEME, ReplicaSettings, ScaledReplica
from cluster.simulate.virtual_clock import VirtualClock
from router.estimated_ttft import TtftParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """At `at_s` of virtual time replica number `replica` is gone and stays away."""

    replica: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """From `at_s` on, steps of replica number `replica` take so many times as long. Its heartbeats do not say so."""

    replica: int
    at_s: float
    times: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """slower: by replica number, how many times as long its steps take."""

    replicas: int = 8
    replica: ReplicaSettings
    event_lag_s: float = 0.0
    death: Death | None = None
    seed: int = 0
    slower: tuple[float, ...] = ()
    slowdown: Slowdown | None = None

    def check(self) -> None:
        if self.replicas < 1:
            raise ConfigError("--replicas must be at least 1")
        if self.event_lag_s < 0:
            raise ConfigError("--event-lag must be 0 or more")
        if self.death is not None and not (0 <= self.death.replica < self.replicas and self.replicas > 1):
            raise ConfigError(f"--kill names replica {self.death.replica}, but there are {self.replicas}, from 0")


class FleetRecord:
    """One request. Times in virtual seconds; None until it happened. `shed`: no replica takes it."""

    __slots__ = ("cached_tokens", "failed", "finished_s", "first_token_s", "replica", "request", "shed")

    def __init__(self, request: TraceRequest) -> None:
        self.request = request
        self.replica = -1
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.cached_tokens = 0
        self.shed = self.failed = False

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """records: by request id.  choosing_s: of real time.  loaded_s: in which a replica prefilled, or
    somebody waited there.  gaps: seconds between tokens, each of so many tokens."""

    records: dict[str, FleetRecord]
    virtual_s: float
    choosing_s: float
    decisions: int
    gaps: array[float]
    gap_counts: array[int]
    preemptions: int
    prefill_tokens: int
    busy_s: list[float]
    loaded_s: list[float]


@dataclass(slots=True, eq=False)
class Member:
    """One replica of the fleet."""

    worker_id: WorkerId
    replica: ScaledReplica
    alive: bool = True
    due: int = 0  # the number of the step end that counts; others were put off


def trace_hashes(requests: Sequence[TraceRequest]) -> dict[str, tuple[ChunkHash, ...]]:
    """By request id, of the whole blocks of each prompt. The same for every run of the trace."""
    root = root_hash(SCHEME)
    return {
        request.request_id: tuple(
            hash_prompt(root, request.hash_ids[: request.prompt_tokens // request.segment_tokens], 1)
        )
        for request in requests
    }


class FleetSimulation:
    """Runs once. `requests`: in order of arrival. `hashes`: of `trace_hashes`. `on_progress`: how many arrived."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        settings: FleetSettings,
        entry: PolicyEntry,
        *,
        hashes: dict[str, tuple[ChunkHash, ...]] | None = None,
        parameters: TtftParameters | None = None,
        on_progress: Callable[[int], None] = lambda _: None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        settings.check()
        self._requests = requests
        self._settings = settings
        self._hashes = trace_hashes(requests) if hashes is None else hashes
        self._on_progress = on_progress
        self._timer = timer
        self._clock = VirtualClock()
        self._members: list[Member] = []
        self._by_id: dict[WorkerId, tuple[int, Member]] = {}
        for _ in range(settings.replicas):
            self._new_member()
        self.router = FleetRouter(
            entry,
            {member.worker_id: member.replica for member in self._members},
            settings.replica,
            self._clock,
            settings.seed,
            parameters,
        )
        self._alive = [member.worker_id for member in self._members]
        self._records: dict[str, FleetRecord] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._serials = itertools.count()
        self._choosing_s = 0.0
        self._decisions = 0
        self._arrived = 0
        self._gaps, self._gap_counts = array("d"), array("q")

    def run(self) -> FleetResult:
        self._expect_next()
        if (death := self._settings.death) is not None:
            self._at(death.at_s, lambda: self._die(self._members[death.replica]))
        if (slowdown := self._settings.slowdown) is not None:
            self._at(slowdown.at_s, lambda: self._slow_down(slowdown))
        agenda, clock = self._agenda, self._clock
        while agenda:
            clock.now, _, act = heapq.heappop(agenda)
            act()
        replicas = [member.replica for member in self._members]
        return FleetResult(
            records=self._records,
            virtual_s=clock.now,
            choosing_s=self._choosing_s,
            decisions=self._decisions,
            gaps=self._gaps,
            gap_counts=self._gap_counts,
            preemptions=sum(replica.preemptions for replica in replicas),
            prefill_tokens=sum(replica.prefill_tokens for replica in replicas),
            busy_s=[replica.busy_s for replica in replicas],
            loaded_s=[replica.loaded_s for replica in replicas],
        )

    def _new_member(self) -> Member:
        number = len(self._members)
        worker_id = WorkerId(f"replica-{number}")
        member = Member(worker_id, ScaledReplica(worker_id, self._replica_settings(number), ROUTER_ID))
        self._members.append(member)
        self._by_id[worker_id] = (number, member)
        return member

    def _replica_settings(self, number: int) -> ReplicaSettings:
        settings = self._settings.replica
        if number >= len(self._settings.slower):
            return settings
        return settings.slowed(self._settings.slower[number])

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time_s, next(self._serials), act))

    def _expect_next(self) -> None:
        if self._arrived < len(self._requests):
            self._at(self._requests[self._arrived].arrival_s, self._arrive)

    def _arrive(self) -> None:
        request = self._requests[self._arrived]
        self._arrived += 1
        self._records[request.request_id] = FleetRecord(request)
        self._send(request)
        self._expect_next()
        if not self._arrived % 64 or self._arrived == len(self._requests):
            self._on_progress(self._arrived)

    def _send(self, request: TraceRequest) -> None:
        began = self._timer()
        chosen = self.router.choose(
            request.request_id, self._hashes[request.request_id], request.prompt_tokens, self._alive
        )
        self._choosing_s += self._timer() - began
        self._decisions += 1
        number, member = self._by_id[chosen]
        record = self._records[request.request_id]
        record.replica = number
        if not member.replica.add(request, self._clock.now):
            record.shed = True
            self.router.state.release(request.request_id)
        elif member.replica.idle:
            self._begin(member)
        elif (sooner := member.replica.interrupt(self._clock.now)) is not None:
            self._expect_end(member, sooner)

    def _begin(self, member: Member) -> None:
        end = member.replica.begin(self._clock.now)
        if end is not None:
            self._expect_end(member, end)

    def _expect_end(self, member: Member, end: float) -> None:
        member.due = due = next(self._serials)
        self._at(end, lambda: self._end_step(member, due))

    def _end_step(self, member: Member, due: int) -> None:
        if not member.alive or member.due != due:
            return
        now = self._clock.now
        step = member.replica.end(now)
        if step.num_gaps:
            self._gaps.append(step.gap_s)
            self._gap_counts.append(step.num_gaps)
        for request_id, cached in step.first:
            self._first_token(member, request_id, cached)
        for request_id in step.done:
            self._records[request_id].finished_s = now
            self.router.state.release(request_id)
        if step.events and self.router.hears_events:
            self._publish(member, step.events)
        self._begin(member)

    def _first_token(self, member: Member, request_id: str, cached: int) -> None:
        record = self._records[request_id]
        record.first_token_s, record.cached_tokens = self._clock.now, cached
        self.router.state.answered(request_id, cached)

    def _publish(self, member: Member, events: list[CacheEvent]) -> None:
        if self._settings.event_lag_s:
            self._at(self._clock.now + self._settings.event_lag_s, lambda: self.router.hear(member.worker_id, events))
        else:
            self.router.hear(member.worker_id, events)

    def _slow_down(self, slowdown: Slowdown) -> None:
        replica = self._members[slowdown.replica].replica
        replica.step_time = replica.step_time.slowed(slowdown.times)

    def _die(self, member: Member) -> None:
        member.alive = False
        self._alive.remove(member.worker_id)
        self.router.lose(member.worker_id)
        for request_id in member.replica.live_requests():
            record = self._records[request_id]
            if record.first_token_s is None:
                self._send(record.request)
            else:
                record.failed = True
                self.router.state.release(request_id)
