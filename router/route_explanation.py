"""RouteExplanation: one decision as it is told to people: who could have taken the request, and what was reused.

Owns: RouteExplanation and the RouteExplainer protocol.
Does not: decide (router.routing_state), or know HTTP or protobuf.
Invariants: candidates are in the order in which they were preferred; nothing here is text of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cluster.core.replica import WorkerId
from router.generation import GenerationCall
from router.reuse_explanation import ReuseExplanation
from router.scoring import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteExplanation:
    """worker_id: where it went, or would go; "" where there is no replica. It need not be the first candidate: Serve
    may have found that one gone.  reuse: None where the request takes nothing from the cache.  dry_run: nothing was
    sent.
    """

    request_id: str
    worker_id: WorkerId
    candidates: tuple[Score, ...]
    reuse: ReuseExplanation | None
    dry_run: bool


class RouteExplainer(Protocol):
    """Implemented by router.front_door."""

    async def explain(self, call: GenerationCall) -> RouteExplanation:
        """What would happen to the call now. Nothing is booked, and no replica hears of it."""

    def explained(self, request_id: str) -> RouteExplanation | None:
        """One of this router's latest requests, by its own id or the client's."""
