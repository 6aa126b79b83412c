"""ServeDispatcher: one call on the worker deployment's handle per request, for as long as the request lives.

Owns: packing the request, passing the route hint, unpacking deltas, translating Ray's failures into ours.
Does not: choose (PrefixAwareRouter does, inside the handle) or retry (front_door does).
Invariants: leaving the stream early cancels the call; an infrastructure failure becomes ReplicaLost or Overloaded.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

import msgpack
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from cluster.core.errors import Overloaded, ReplicaLost
from cluster.core.replica import WorkerId
from cluster.core.request import GenerationRequest, TokenDelta
from router.prefix_router import HINT_KEYWORD
from router.route_ledger import RouteLedger
from router.routing_state import RouteHint

logger = logging.getLogger(__name__)


class ServeDispatcher:
    def __init__(self, workers: DeploymentHandle, ledger: RouteLedger) -> None:
        self._generate = workers.options(stream=True, method_name="generate")
        self._ledger = ledger

    async def dispatch(
        self, request: GenerationRequest, hint: RouteHint
    ) -> AsyncGenerator[tuple[WorkerId, TokenDelta], None]:
        stream = self._generate.remote(msgpack.packb(request.to_wire()), **{HINT_KEYWORD: hint})
        finished = False
        try:
            async for message in stream:
                worker_id, wire = msgpack.unpackb(message)
                delta = TokenDelta.from_wire(wire)
                finished = delta.last
                if delta.error is not None:
                    delta.error.details.setdefault("worker_id", worker_id)
                    raise delta.error
                yield WorkerId(worker_id), delta
            finished = True
        except BackPressureError as error:
            raise Overloaded("every replica's queue is full", retry_after_s=1.0) from error
        except DeploymentUnavailableError as error:
            raise ReplicaLost("no replica can be reached") from error
        except RayError as error:
            finished = True
            raise self._lost(request, error) from error
        finally:
            if not finished:
                stream.cancel()

    def _lost(self, request: GenerationRequest, error: RayError) -> ReplicaLost:
        life = self._ledger.booked_on(request.request_id)
        details: dict[str, Any] = {} if life is None else {"worker_id": life[0]}
        if isinstance(error, RayActorError):
            return ReplicaLost("the replica died", **details)
        logger.warning("a worker call failed: %s", type(error).__name__)
        return ReplicaLost("the call to the replica failed", dead=False, **details)
