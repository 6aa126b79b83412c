"""OwnWork: the compute seconds that this router has sent to each replica and not yet seen done, and what decodes there.

    booked ---> first token: its prefill is done, it decodes ---> released
    A [2.0 s]  B [0.5 s]  C [1.0 s]       A began 1.2 s ago: 0.8 s are left of it, 2.3 s in all

A replica takes whoever has most in its cache first, so a request overtakes those that find less, unless they wait for
too long already (worker.scheduling.waiting_queue). `Work` is told for one overlap for that reason.

What is computed for much longer than estimated makes its replica a slow one (router.replica_pace), and all that is
booked there counts for more.

Owns: that estimate of what is left, and of what a newcomer overtakes, and the measuring of replicas' paces.
Does not: know other routers' requests (heartbeats do), or how long anything takes (router.estimated_ttft).
Invariants: every call may come twice or for a request never booked; nothing is kept of a request after `release`, or
of a worker without requests; what is left is never negative; a wait for a seat is no sign of a slow replica.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.core.replica import WorkerId
from router.replica_pace import SLOWER, ReplicaPace

AGEING_S = 2.0  # as EngineConfig.ageing_s
SEATS = 64  # as EngineConfig.max_num_seqs
_SAME_OVERLAP = 0.1  # of the prompt: an answer that found less in the cache than expected says nothing of the pace
_NEWEST_SHARE = 0.05  # of the newest request in the mean time that requests decode


class Work(NamedTuple):
    """ahead_s: compute before a newcomer's own.  overtaken: waiting requests that it makes wait longer.

    decoding, decode_tokens: requests past their first token, and the positions they read in each step.
    active_tokens: the prompts of all live requests.  decode_s: how long requests lately decoded, on any replica, or how
    long those there have decoded so far, if that is longer.
    """

    ahead_s: float = 0.0
    overtaken: int = 0
    decoding: int = 0
    decode_tokens: int = 0
    active_tokens: int = 0
    decode_s: float = 0.0


NO_WORK = Work()


@dataclass(slots=True, eq=False)
class _Booking:
    """seconds: at the pace of the replica's step-time model."""

    worker_id: WorkerId
    seconds: float
    prompt_tokens: int
    overlap_tokens: int
    booked_at: float
    answered_at: float | None = None


@dataclass(slots=True, eq=False)
class _Worker:
    """began_at: when the first of `waiting`, which is the one that is computed, was begun.

    answered_at: the sum of the times at which what decodes began to."""

    waiting: dict[str, _Booking] = field(default_factory=dict)
    began_at: float = 0.0
    decoding: int = 0
    decode_tokens: int = 0
    active_tokens: int = 0
    answered_at: float = 0.0


class OwnWork:
    """Times are of one monotonic clock, which the caller reads. `seats`: `max_num_seqs` of a replica's engine."""

    def __init__(self, ageing_s: float = AGEING_S, seats: int = SEATS) -> None:
        self._ageing_s = ageing_s
        self._seats = seats
        self._bookings: dict[str, _Booking] = {}
        self._workers: dict[WorkerId, _Worker] = {}
        self._decode_s = 0.0
        self._decoded = 0
        self._pace = ReplicaPace()
        self._told: dict[WorkerId, float] = {}  # paces that the estimates of bookings to come are made with

    def __len__(self) -> int:
        return len(self._bookings)

    def pace(self, worker_id: WorkerId, now: float) -> float:
        """How many times as long as its model says the replica takes; the seconds to be booked there are by that."""
        worker = self._workers.get(worker_id)
        running_s = expected_s = 0.0
        if worker is not None and worker.waiting:
            expected_s = next(iter(worker.waiting.values())).seconds
            running_s = self._running_s(worker, now)
            if running_s < SLOWER * expected_s:
                running_s = expected_s = 0.0
        pace = self._pace.of(worker_id, now, running_s, expected_s)
        if pace != 1.0:
            self._told[worker_id] = pace
        elif self._told:
            self._told.pop(worker_id, None)
        return pace

    def book(
        self, request_id: str, worker_id: WorkerId, seconds: float, prompt_tokens: int, overlap_tokens: int, now: float
    ) -> None:
        self.release(request_id, now)
        worker = self._workers.setdefault(worker_id, _Worker())
        if not worker.waiting:
            worker.began_at = now
        seconds /= self._told.get(worker_id, 1.0)
        booking = _Booking(worker_id, seconds, prompt_tokens, overlap_tokens, now)
        worker.active_tokens += prompt_tokens
        self._bookings[request_id] = worker.waiting[request_id] = booking

    def answered(self, request_id: str, now: float, cached_tokens: int | None = None) -> None:
        """Its first token is here. cached_tokens: what it found in the cache; None: nothing was computed."""
        booking = self._bookings.get(request_id)
        if booking is None or booking.answered_at is not None:
            return
        booking.answered_at = now
        worker = self._workers[booking.worker_id]
        del worker.waiting[request_id]
        enough = booking.overlap_tokens - _SAME_OVERLAP * booking.prompt_tokens
        if cached_tokens is not None and cached_tokens >= enough:
            self._pace.answered(booking.worker_id, booking.seconds, now - worker.began_at, now)
        worker.began_at = now
        worker.decoding += 1
        worker.decode_tokens += booking.prompt_tokens
        worker.answered_at += now

    def release(self, request_id: str, now: float) -> None:
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            return
        worker = self._workers[booking.worker_id]
        worker.active_tokens -= booking.prompt_tokens
        if booking.answered_at is not None:
            if worker.decoding >= self._seats:  # there was no seat for the first of `waiting` until now
                worker.began_at = now
            self._decoded += 1
            share = max(_NEWEST_SHARE, 1.0 / self._decoded)  # the first ones count alike
            self._decode_s += share * (now - booking.answered_at - self._decode_s)
            worker.decoding -= 1
            worker.decode_tokens -= booking.prompt_tokens
            worker.answered_at = worker.answered_at - booking.answered_at if worker.decoding else 0.0
        else:
            if next(iter(worker.waiting)) == request_id:
                worker.began_at = now
            del worker.waiting[request_id]
        if not worker.waiting and not worker.decoding:
            del self._workers[booking.worker_id]

    def end_life(self, worker_id: WorkerId) -> None:
        """The worker's process is gone, and its requests with it."""
        self._pace.forget(worker_id)
        self._told.pop(worker_id, None)
        if self._workers.pop(worker_id, None) is not None:
            for request_id in [name for name, one in self._bookings.items() if one.worker_id == worker_id]:
                del self._bookings[request_id]

    def look(self, worker_id: WorkerId, overlap_tokens: int, now: float) -> Work:
        """What a request that is sent there now, and finds so much, has before it and behind it."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return NO_WORK
        ahead, overtaken, first, aged = 0.0, 0, True, now - self._ageing_s
        pace = self._told.get(worker_id, 1.0)
        for booking in worker.waiting.values():
            if first:
                first = False
                ahead = max(pace * booking.seconds - self._running_s(worker, now), 0.0)
            elif booking.overlap_tokens >= overlap_tokens or booking.booked_at <= aged:
                ahead += pace * booking.seconds
            else:
                overtaken += 1
        decoding, decode_s = worker.decoding, self._decode_s
        if decoding:
            decode_s = max(decode_s, now - worker.answered_at / decoding)
        return Work(ahead, overtaken, decoding, worker.decode_tokens, worker.active_tokens, decode_s)

    def _running_s(self, worker: _Worker, now: float) -> float:
        """How long the first of `waiting` has been computed; it is not while all seats are taken."""
        return now - worker.began_at if worker.decoding < self._seats else 0.0
