"""RouteLedger: the uncached prompt tokens this router has sent to each replica and not yet seen prefilled.

Owns: the bookings of this router's own live requests.
Does not: know other routers' requests (heartbeats carry those) or choose replicas.
Invariants: booking, prefill_done and release are idempotent; booking again moves a request; every booking belongs
to one (worker, epoch), so nothing done for a dead life changes the load of the next; loads are never negative.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cluster.core.replica import Epoch, WorkerId

Life = tuple[WorkerId, Epoch]


@dataclass(slots=True)
class _Booking:
    life: Life
    tokens: int


class RouteLedger:
    def __init__(self) -> None:
        self._bookings: dict[str, _Booking] = {}
        self._tokens: Counter[Life] = Counter()
        self._requests: Counter[Life] = Counter()

    def book(self, request_id: str, worker_id: WorkerId, epoch: Epoch, tokens: int) -> None:
        """Count `tokens` uncached tokens on (worker, epoch) until the first token; moves an older booking."""
        self.release(request_id)
        life = (worker_id, epoch)
        self._bookings[request_id] = _Booking(life, max(tokens, 0))
        self._tokens[life] += max(tokens, 0)
        self._requests[life] += 1

    def prefill_done(self, request_id: str) -> None:
        booking = self._bookings.get(request_id)
        if booking is not None:
            self._take(self._tokens, booking.life, booking.tokens)
            booking.tokens = 0

    def release(self, request_id: str) -> None:
        booking = self._bookings.pop(request_id, None)
        if booking is not None:
            self._take(self._tokens, booking.life, booking.tokens)
            self._take(self._requests, booking.life, 1)

    def booked_on(self, request_id: str) -> Life | None:
        booking = self._bookings.get(request_id)
        return None if booking is None else booking.life

    def booked_tokens(self, request_id: str) -> int:
        booking = self._bookings.get(request_id)
        return 0 if booking is None else booking.tokens

    def uncached_tokens(self, worker_id: WorkerId, epoch: Epoch) -> int:
        return self._tokens[(worker_id, epoch)]

    def requests(self, worker_id: WorkerId, epoch: Epoch) -> int:
        return self._requests[(worker_id, epoch)]

    def _take(self, counter: Counter[Life], life: Life, amount: int) -> None:
        counter[life] -= amount
        if counter[life] == 0:
            del counter[life]
