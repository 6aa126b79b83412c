"""Attempts: one request, sent to a replica, and to another when that one refuses or dies before the first token.

Owns: dispatching, whether and where to route again, and telling each engine how much of the deadline is left.
Does not: know text, HTTP, protobuf or Ray (Dispatcher does), choose replicas, or run the deadline's timer (deadline).
Invariants: tokens come from one attempt only; a replica that refused or died is excluded from the next attempt; once
the deadline has passed no replica is asked.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from cluster.core.errors import Overloaded, ReplicaLost
from cluster.core.replica import WorkerId
from cluster.core.request import GenerationRequest, TokenDelta
from router.deadline import Deadline
from router.routing_state import RouteHint

MAX_ATTEMPTS = 3


class Dispatcher(Protocol):
    def dispatch(
        self, request: GenerationRequest, hint: RouteHint, *, whole: bool = False
    ) -> AsyncGenerator[tuple[WorkerId, TokenDelta], None]:
        """Send to a replica and stream its deltas; with `whole`, many of them may come as one.

        Raises the replica's typed error, or ReplicaLost when the call broke; both carry details["worker_id"] when the
        replica is known. details["dead"] is False where only the call failed and the replica may well live."""


class Attempts:
    """`on_lost`: a replica died under a request."""

    def __init__(self, dispatcher: Dispatcher, on_lost: Callable[[WorkerId], None] = lambda worker_id: None) -> None:
        self._dispatcher = dispatcher
        self._on_lost = on_lost

    async def deltas(
        self, request: GenerationRequest, hint: RouteHint, deadline: Deadline, *, whole: bool = False
    ) -> AsyncGenerator[tuple[WorkerId, TokenDelta], None]:
        """Those of the first attempt that yields any."""
        excluded: frozenset[WorkerId] = frozenset()
        tokens_out, refusals, deaths = 0, 0, 0
        for attempt in range(MAX_ATTEMPTS):
            timed, hint = replace(request, timeout_s=deadline.left_s()), replace(hint, exclude=excluded)
            try:
                async with aclosing(self._dispatcher.dispatch(timed, hint, whole=whole)) as stream:
                    async for worker_id, delta in stream:
                        tokens_out += len(delta.token_ids)
                        yield worker_id, delta
                        if delta.last:
                            return
                raise ReplicaLost("the replica ended the stream before the answer was complete")
            except (ReplicaLost, Overloaded) as error:
                worker = error.details.get("worker_id")
                if isinstance(error, ReplicaLost) and worker is not None and error.details.get("dead", True):
                    deaths += 1
                    self._on_lost(worker)
                if tokens_out:
                    raise ReplicaLost(
                        f"the replica was lost after {tokens_out} tokens; send the request again", tokens=tokens_out
                    ) from error
                refusals += isinstance(error, Overloaded)
                if attempt == MAX_ATTEMPTS - 1 or refusals > 1 or deaths > 1:
                    raise  # a request that two engines died of shall not kill a third
                if worker is not None:
                    excluded |= {worker}
