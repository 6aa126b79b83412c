"""PrefixAwareRouter: the adapter between Ray Serve's request routing and `RoutingState`.

Named by import string in the worker deployment's RequestRouterConfig. It runs in every process that holds a handle
to the workers, on that process's event loop. Serve pickles this module by value, so it keeps no live state of its
own.

Owns: popping the route ticket from the request, and translating replica ids.
Does not: score, look up or book (router.routing_state); never blocks.
Invariants: one replica per rank, so that Serve does not re-choose by queue length; the ticket never reaches a worker;
without a state (a handle outside the ingress) the order of Serve's candidates is kept; nothing is booked for a call
that is over, or that Serve has placed already.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cluster.core.replica import WorkerId
from router import routing_state
from router.route_hint import RouteTicket
from router.routing_state import RoutingState

TICKET_KEYWORD = "route_ticket"


class PrefixAwareRouter(RequestRouter):  # type: ignore[misc]
    def initialize_state(self, state_name: str = "") -> None:
        self._state_name = state_name

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        state, ticket = self._state(), _ticket_of(pending_request)
        if state is None or ticket is None or pending_request is None:
            return [[replica] for replica in candidate_replicas]
        pending_request.routing_context.should_backoff = True
        if not ticket.open or pending_request.future.done():
            return [[replica] for replica in candidate_replicas]
        by_id = {WorkerId(r.replica_id.unique_id): r for r in candidate_replicas}
        ticket.placed = ticket.placed or bool(by_id)
        return [[by_id[worker_id]] for worker_id in state.decide(ticket.hint, list(by_id))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        state, ticket = self._state(), _ticket_of(pending_request)
        if state is not None and ticket is not None and ticket.open:
            state.routed(ticket.hint, WorkerId(replica_id.unique_id))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        state = self._state()
        if state is not None:
            state.mark_lost(WorkerId(replica_id.unique_id))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        state = self._state()
        if state is not None:
            state.keep_only([WorkerId(r.replica_id.unique_id) for r in replicas])

    def _state(self) -> RoutingState | None:
        return routing_state.installed(getattr(self, "_state_name", ""))


def _ticket_of(pending_request: PendingRequest | None) -> RouteTicket | None:
    """The ticket, moved from the keyword arguments (which go to the worker) to the request object (which stays)."""
    if pending_request is None:
        return None
    if TICKET_KEYWORD in pending_request.kwargs:
        pending_request.kvray_ticket = pending_request.kwargs.pop(TICKET_KEYWORD)
    return getattr(pending_request, "kvray_ticket", None)
