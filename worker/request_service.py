"""RequestService: the one call of a replica, `answer`, which lives as long as its request.

The tokens go over the token channel when the router that asks is connected to it, and as items of this call when it
is not (the first answers, a firewall).

Owns: reading the payload, choosing the way of the tokens, and what the call itself says.
Does not: know Ray, or run or schedule anything (engine_client).
Invariants: errors travel as data, so that they keep their type; leaving the call early cancels the request; an answer
never changes its way.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgpack

from cluster.core.errors import KvrayError
from cluster.core.request import GenerationRequest, TokenDelta
from cluster.token_channel import WorkerCall, WorkerReply
from worker.delta_sink import CollectingSink
from worker.engine_client import EngineClient
from worker.token_channel_server import TokenChannelServer


class RequestService:
    def __init__(self, engine: EngineClient, channel: TokenChannelServer) -> None:
        self._engine = engine
        self._channel = channel

    async def answer(self, payload: bytes) -> AsyncGenerator[bytes, None]:
        """`payload` is msgpack [GenerationRequest, WorkerCall]; each item is a msgpack WorkerReply."""
        request_wire, call_wire = msgpack.unpackb(payload)
        request, call = GenerationRequest.from_wire(request_wire), WorkerCall.from_wire(call_wire)
        worker_id, offer = self._channel.worker_id, self._channel.offer
        sink = self._channel.sink(request.router_id, call.number)
        try:
            if sink is not None:
                await self._engine.pump(request, CollectingSink(sink) if call.whole else sink)
                yield _packed(WorkerReply(worker_id=worker_id))
                return
            async for delta in self._engine.generate(request):
                yield _packed(WorkerReply(worker_id=worker_id, delta=delta, offer=offer))
                offer = None
        except KvrayError as error:
            failed = TokenDelta(request_id=request.request_id, error=error)
            yield _packed(WorkerReply(worker_id=worker_id, delta=failed, offer=offer if sink is None else None))


def _packed(reply: WorkerReply) -> bytes:
    packed: bytes = msgpack.packb(reply.to_wire())
    return packed
