"""The token channel: one socket from a replica to each router, and on it one message per engine step.

A Serve call is the life of a request, but an item of a streaming call costs both processes several times what the
token itself does. So the call stays open and silent, and the tokens of all requests of a router share this socket.
A router learns where it is from the first answer that came through Serve (ChannelOffer), and connects for the next.

    router -> replica   [PROTOCOL, secret, router id]      once; a wrong secret closes the connection
    replica -> router   [PROTOCOL, worker id]              once
    replica -> router   [[call, token ids, ...], ...]      per step: the deltas of this router's calls

Owns: the offer, the messages and their wire forms, and the bounds of both sides.
Does not: listen (worker.token_channel_server) or connect (router.token_channels).
Invariants: the secret travels only through Serve and in a connection's first message; a call's number is unique in its
router's life, so a late delta of an attempt that was given up can reach no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cluster.core.request import TokenDelta

PROTOCOL = "kvray-tokens-1"
HANDSHAKE_TIMEOUT_S = 5.0
MAX_MESSAGE_BYTES = 64 * 2**20
# What may wait in a replica for a router that does not read: hours of one stream, or the log probabilities of a dozen
# long prompts; then the router is cut off.
MAX_BUFFER_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelOffer:
    """Where a replica listens. unix: name in the abstract namespace, for routers on the same host; "" for none."""

    unix: str
    host: str
    port: int
    secret: str = field(repr=False)

    def to_wire(self) -> list[Any]:
        return [self.unix, self.host, self.port, self.secret]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> ChannelOffer:
        unix, host, port, secret = wire
        return cls(unix=unix, host=host, port=port, secret=secret)


def delta_to_wire(call: int, delta: TokenDelta) -> list[Any]:
    """A delta's own wire form, under the call's number instead of the request's id."""
    wire = delta.to_wire()
    wire[0] = call
    return wire


def delta_from_wire(request_id: str, wire: list[Any]) -> TokenDelta:
    return TokenDelta.from_wire([request_id, *wire[1:]])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCall:
    """What a router sends with a request. whole: nobody waits for single tokens, so they may come in larger pieces."""

    number: int
    whole: bool = False

    def to_wire(self) -> list[Any]:
        return [self.number, self.whole]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> WorkerCall:
        number, whole = wire
        return cls(number=number, whole=whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReply:
    """One item of the Serve call. delta None: the answer went over the channel and is complete.

    offer: on the first item of an answer that comes through Serve.
    """

    worker_id: str
    delta: TokenDelta | None = None
    offer: ChannelOffer | None = None

    def to_wire(self) -> list[Any]:
        return [
            self.worker_id,
            None if self.delta is None else self.delta.to_wire(),
            None if self.offer is None else self.offer.to_wire(),
        ]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> WorkerReply:
        worker_id, delta, offer = wire
        return cls(
            worker_id=worker_id,
            delta=None if delta is None else TokenDelta.from_wire(delta),
            offer=None if offer is None else ChannelOffer.from_wire(offer),
        )
