"""What accompanies one call to a replica from the ingress to the chooser of replicas, and never to the replica.

Owns: RouteHint, PromptTrail and RouteTicket.
Does not: choose or book (router.routing_state).
Invariants: a ticket belongs to one call on the workers' handle and is never opened again; no text is in here.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from cluster.core.hashing import ChunkHash
from cluster.core.replica import WorkerId

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTrail:
    """What it takes to say where a prompt parts from earlier ones.

    root: the hash before its first chunk.  tokens: its ids, packed as u32.  plain_root, plain_hashes: as the prompt
    would be hashed without its salt; the same as with it where there is none.  message_ends: of a chat, the number of
    tokens up to the end of each message; empty where that is not known.
    """

    root: ChunkHash
    tokens: bytes
    plain_root: ChunkHash
    plain_hashes: tuple[ChunkHash, ...]
    message_ends: tuple[int, ...] = ()

    @property
    def salted(self) -> bool:
        return self.root != self.plain_root

    def message_of(self, position: int) -> int | None:
        """The message that the token at `position` belongs to; None behind the last and where nobody knows."""
        index = bisect_right(self.message_ends, position)
        return index if index < len(self.message_ends) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteHint:
    """A prompt as routing sees it. exclude: replicas that refused it or died of it.

    client_id: how the client knows the request.  trail: None where nothing shall be said of its reuse.
    """

    request_id: str
    chunk_hashes: tuple[ChunkHash, ...]
    prompt_tokens: int
    exclude: frozenset[WorkerId] = frozenset()
    client_id: str = ""
    trail: PromptTrail | None = None


@dataclass(slots=True)
class RouteTicket:
    """The hint of one call. Serve may still ask where to send it when it is over already.

    placed: there was a replica to choose.
    """

    hint: RouteHint
    open: bool = True
    placed: bool = False
