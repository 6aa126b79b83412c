"""OwnWork: the compute seconds that this router has sent to each replica and not yet seen done, and what decodes there.

    booked ---> first token: its prefill is done, it decodes ---> released
    A [2.0 s]  B [0.5 s]  C [1.0 s]       A began 1.2 s ago: 0.8 s are left of it, 2.3 s in all

A replica takes whoever has most in its cache first, so a request overtakes those that find less, unless they wait for
too long already (worker.scheduling.waiting_queue). `Work` is told for one overlap for that reason.

Owns: that estimate of what is left, and of what a newcomer overtakes.
Does not: know other routers' requests (heartbeats do), or how long anything takes (router.estimated_ttft).
Invariants: every call may come twice or for a request never booked; nothing is kept of a request after `release`, or
of a worker without requests; what is left is never negative.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.core.replica import WorkerId

AGEING_S = 2.0  # as EngineConfig.ageing_s
_NEWEST_SHARE = 0.05  # of the newest request in the mean time that requests decode


class Work(NamedTuple):
    """ahead_s: compute before a newcomer's own.  overtaken: waiting requests that it makes wait longer.

    decoding, decode_tokens: requests past their first token, and the positions they read in each step.
    active_tokens: the prompts of all live requests.  decode_s: how long requests lately decoded, on any replica.
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
    worker_id: WorkerId
    seconds: float
    prompt_tokens: int
    overlap_tokens: int
    booked_at: float
    answered_at: float | None = None


@dataclass(slots=True, eq=False)
class _Worker:
    """began_at: when the first of `waiting`, which is the one that is computed, was begun."""

    waiting: dict[str, _Booking] = field(default_factory=dict)
    began_at: float = 0.0
    decoding: int = 0
    decode_tokens: int = 0
    active_tokens: int = 0


class OwnWork:
    """Times are of one monotonic clock, which the caller reads."""

    def __init__(self, ageing_s: float = AGEING_S) -> None:
        self._ageing_s = ageing_s
        self._bookings: dict[str, _Booking] = {}
        self._workers: dict[WorkerId, _Worker] = {}
        self._decode_s = 0.0

    def __len__(self) -> int:
        return len(self._bookings)

    def book(
        self, request_id: str, worker_id: WorkerId, seconds: float, prompt_tokens: int, overlap_tokens: int, now: float
    ) -> None:
        self.release(request_id, now)
        worker = self._workers.setdefault(worker_id, _Worker())
        if not worker.waiting:
            worker.began_at = now
        booking = _Booking(worker_id, seconds, prompt_tokens, overlap_tokens, now)
        worker.active_tokens += prompt_tokens
        self._bookings[request_id] = worker.waiting[request_id] = booking

    def answered(self, request_id: str, now: float) -> None:
        """Its first token is here."""
        booking = self._bookings.get(request_id)
        if booking is None or booking.answered_at is not None:
            return
        booking.answered_at = now
        worker = self._workers[booking.worker_id]
        del worker.waiting[request_id]
        worker.began_at = now
        worker.decoding += 1
        worker.decode_tokens += booking.prompt_tokens

    def release(self, request_id: str, now: float) -> None:
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            return
        worker = self._workers[booking.worker_id]
        worker.active_tokens -= booking.prompt_tokens
        if booking.answered_at is not None:
            self._decode_s += _NEWEST_SHARE * (now - booking.answered_at - self._decode_s)
            worker.decoding -= 1
            worker.decode_tokens -= booking.prompt_tokens
        else:
            if next(iter(worker.waiting)) == request_id:
                worker.began_at = now
            del worker.waiting[request_id]
        if not worker.waiting and not worker.decoding:
            del self._workers[booking.worker_id]

    def end_life(self, worker_id: WorkerId) -> None:
        """The worker's process is gone, and its requests with it."""
        if self._workers.pop(worker_id, None) is not None:
            for request_id in [name for name, one in self._bookings.items() if one.worker_id == worker_id]:
                del self._bookings[request_id]

    def look(self, worker_id: WorkerId, overlap_tokens: int, now: float) -> Work:
        """What a request that is sent there now, and finds so much, has before it and behind it."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return NO_WORK
        ahead, overtaken, first, aged = 0.0, 0, True, now - self._ageing_s
        for booking in worker.waiting.values():
            if first:
                first = False
                ahead = max(booking.seconds - (now - worker.began_at), 0.0)
            elif booking.overlap_tokens >= overlap_tokens or booking.booked_at <= aged:
                ahead += booking.seconds
            else:
                overtaken += 1
        return Work(ahead, overtaken, worker.decoding, worker.decode_tokens, worker.active_tokens, self._decode_s)
