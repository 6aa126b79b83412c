"""What accompanies one call to a replica from the ingress to the chooser of replicas, and never to the replica.

Owns: RouteHint and RouteTicket.
Does not: choose or book (router.routing_state).
Invariants: a ticket belongs to one call on the workers' handle and is never opened again.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.hashing import ChunkHash
from cluster.core.replica import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteHint:
    """A prompt as routing sees it. exclude: replicas that refused it or died of it."""

    request_id: str
    chunk_hashes: tuple[ChunkHash, ...]
    prompt_tokens: int
    exclude: frozenset[WorkerId] = frozenset()


@dataclass(slots=True)
class RouteTicket:
    """The hint of one call. Serve may still ask where to send it when it is over already."""

    hint: RouteHint
    open: bool = True
