"""ServeDispatcher: one call on the worker deployment's handle per request, for as long as the request lives.

The replica answers over its token channel if this router is connected to it, else as items of the call.

Owns: packing the request, the route ticket, reading the call, how long a request waits while there is no replica to
choose (none was started yet, or all are gone), translating Ray's failures into ours.
Does not: choose (PrefixAwareRouter does, inside the handle), retry (front_door does) or hold sockets (token_channels).
Invariants: leaving the stream early cancels the call; an infrastructure failure becomes ReplicaLost or Overloaded; the
ticket is open exactly as long as the stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import msgpack
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from cluster.config import RouterConfig
from cluster.core.errors import NoReplica, Overloaded, ReplicaLost
from cluster.core.replica import WorkerId
from cluster.core.request import GenerationRequest, TokenDelta
from cluster.token_channel import WorkerCall, WorkerReply
from router.prefix_router import TICKET_KEYWORD
from router.route_hint import RouteHint, RouteTicket
from router.route_ledger import RouteLedger
from router.token_call import TokenCall
from router.token_channels import TokenChannels

logger = logging.getLogger(__name__)


class ServeDispatcher:
    def __init__(
        self,
        workers: DeploymentHandle,
        ledger: RouteLedger,
        channels: TokenChannels,
        start_wait_s: float = RouterConfig().start_wait_s,
    ) -> None:
        self._generate = workers.options(stream=True, method_name="generate")
        self._ledger = ledger
        self._channels = channels
        self._start_wait_s = start_wait_s
        self._readers: set[asyncio.Task[None]] = set()

    async def dispatch(
        self, request: GenerationRequest, hint: RouteHint, *, whole: bool = False
    ) -> AsyncGenerator[tuple[WorkerId, TokenDelta], None]:
        with self._channels.call(request.request_id) as call:
            payload = [request.to_wire(), WorkerCall(number=call.number, whole=whole).to_wire()]
            ticket = RouteTicket(hint)
            stream = self._generate.remote(msgpack.packb(payload), **{TICKET_KEYWORD: ticket})
            # It goes on after the last token, until Serve has seen the call's end.
            reader = asyncio.create_task(self._read(stream, call))
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)
            waits = asyncio.get_running_loop().call_later(self._start_wait_s, self._give_up, ticket, call)
            finished = False
            try:
                while (item := await call.next()) is not None:
                    worker_id, delta = item
                    finished = delta.last
                    if delta.error is not None:
                        delta.error.details.setdefault("worker_id", worker_id)
                        raise delta.error
                    yield worker_id, delta
                    if finished:
                        return
                finished = True
            except BackPressureError as error:
                raise Overloaded("every replica's queue is full", retry_after_s=1.0) from error
            except DeploymentUnavailableError as error:
                raise ReplicaLost("no replica can be reached") from error
            except RayError as error:
                finished = True
                raise self._lost(request, error) from error
            finally:
                waits.cancel()
                ticket.open = False  # cancelling takes Serve a few turns, in which it may choose again
                if not finished:
                    stream.cancel()

    async def _read(self, stream: Any, call: TokenCall) -> None:
        """Pass on what the Serve call says, through to its end."""
        try:
            async for message in stream:
                reply = WorkerReply.from_wire(msgpack.unpackb(message))
                worker_id = WorkerId(reply.worker_id)
                if reply.offer is not None:
                    self._channels.learn(worker_id, reply.offer)
                if reply.delta is None:
                    call.answered()
                else:
                    call.put(worker_id, reply.delta)
        except asyncio.CancelledError:
            call.over(ReplicaLost("the call to the replica was cancelled", dead=False))
            raise
        except Exception as error:
            call.over(error)
        else:
            call.over()

    def _give_up(self, ticket: RouteTicket, call: TokenCall) -> None:
        if not ticket.placed:
            call.over(NoReplica(f"no replica was there within {self._start_wait_s:g} s"))

    def _lost(self, request: GenerationRequest, error: RayError) -> ReplicaLost:
        life = self._ledger.booked_on(request.request_id)
        details: dict[str, Any] = {} if life is None else {"worker_id": life[0]}
        if isinstance(error, RayActorError):
            return ReplicaLost("the replica died", **details)
        logger.warning("a worker call failed: %s", type(error).__name__)
        return ReplicaLost("the call to the replica failed", dead=False, **details)
