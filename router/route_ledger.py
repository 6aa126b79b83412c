"""RouteLedger: the uncached prompt tokens this router has sent to each replica and not yet seen prefilled.

Owns: the bookings of this router's own live requests.
Does not: know other routers' requests (heartbeats carry those), choose replicas, or tell a new life from a new epoch
of the old one (replica_lives).
Invariants: booking, prefill_done and release are idempotent; booking again moves a request; every booking belongs
to one (worker, epoch), so nothing done for a dead life changes the load of the next; loads are never negative, and
nothing is kept of a life without bookings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cluster.core.replica import Epoch, WorkerId

Life = tuple[WorkerId, Epoch]


class OwnLoad(NamedTuple):
    """This router's share of a replica's load: uncached tokens not yet prefilled, and requests not yet ended."""

    tokens: int = 0
    requests: int = 0


NO_LOAD = OwnLoad()


@dataclass(slots=True)
class _Booking:
    life: Life
    tokens: int


class RouteLedger:
    def __init__(self) -> None:
        self._bookings: dict[str, _Booking] = {}
        self._loads: dict[Life, OwnLoad] = {}

    def __len__(self) -> int:
        """Requests that are booked, on whatever life."""
        return len(self._bookings)

    def book(self, request_id: str, worker_id: WorkerId, epoch: Epoch, tokens: int) -> None:
        """Count `tokens` uncached tokens on (worker, epoch) until the first token; moves an older booking."""
        self.release(request_id)
        life, tokens = (worker_id, epoch), max(tokens, 0)
        self._bookings[request_id] = _Booking(life, tokens)
        self._add(life, tokens, 1)

    def prefill_done(self, request_id: str) -> None:
        booking = self._bookings.get(request_id)
        if booking is not None:
            self._add(booking.life, -booking.tokens, 0)
            booking.tokens = 0

    def release(self, request_id: str) -> None:
        booking = self._bookings.pop(request_id, None)
        if booking is not None:
            self._add(booking.life, -booking.tokens, -1)

    def carry_over(self, worker_id: WorkerId, old: Epoch, new: Epoch) -> None:
        """The process behind (worker, old) goes on as (worker, new), and so do its requests."""
        if old == new or (worker_id, old) not in self._loads:
            return
        for booking in self._bookings.values():
            if booking.life == (worker_id, old):
                booking.life = (worker_id, new)
        moved = self._loads.pop((worker_id, old))
        self._add((worker_id, new), moved.tokens, moved.requests)

    def booked_on(self, request_id: str) -> Life | None:
        booking = self._bookings.get(request_id)
        return None if booking is None else booking.life

    def load(self, worker_id: WorkerId, epoch: Epoch) -> OwnLoad:
        return self._loads.get((worker_id, epoch), NO_LOAD)

    def uncached_tokens(self, worker_id: WorkerId, epoch: Epoch) -> int:
        return self.load(worker_id, epoch).tokens

    def requests(self, worker_id: WorkerId, epoch: Epoch) -> int:
        return self.load(worker_id, epoch).requests

    def _add(self, life: Life, tokens: int, requests: int) -> None:
        before = self._loads.get(life, NO_LOAD)
        after = OwnLoad(before.tokens + tokens, before.requests + requests)
        if after.requests:
            self._loads[life] = after
        else:
            del self._loads[life]
