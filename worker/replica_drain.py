"""ReplicaDrain: what happens between the moment that Serve stops a replica and its end.

    Serve stops it             no router is offered it any more
    `is_stopping`              the engine refuses new requests (Overloaded: routed to another replica), heartbeats say
                               draining, and streams go on
    streams ended, or limit    those that are left get ReplicaLost, which says that the request may be sent again
    leave                      the entries of this life leave the index at once, not when its heartbeat expires
    Serve's destructor         the processes end

Owns: this order and the limit.
Does not: know Serve (worker.deployment asks it), the index or processes.
Invariants: `leave` comes after the last token and before the destructor's end; an engine that dies only shortens it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from cluster.core.errors import KvrayError, ReplicaLost

logger = logging.getLogger(__name__)

POLL_S = 0.25


class DrainedEngine(Protocol):
    """Of EngineClient, what a drain needs."""

    async def drain(self) -> None: ...

    def end_all(self, error: KvrayError) -> int: ...


class ReplicaDrain:
    """`is_stopping` is asked every `POLL_S`; `limit_s` counts from when it says so."""

    def __init__(
        self,
        engine: DrainedEngine,
        is_stopping: Callable[[], bool],
        leave: Callable[[], Awaitable[None]],
        limit_s: float,
    ) -> None:
        self._engine = engine
        self._is_stopping = is_stopping
        self._leave = leave
        self._limit_s = limit_s

    async def run(self) -> None:
        """Wait for the stop, then drain."""
        while not self._is_stopping():
            await asyncio.sleep(POLL_S)
        logger.info("this replica is being stopped: its answers have %g s to end", self._limit_s)
        try:
            async with asyncio.timeout(self._limit_s):
                await self._engine.drain()
        except TimeoutError:
            lost = ReplicaLost("the replica was stopped before the answer was complete; send it again", dead=False)
            logger.warning(
                "%d answers were not complete in %g s and are cut off", self._engine.end_all(lost), self._limit_s
            )
        except ReplicaLost as error:
            logger.warning("the engine ended while it was drained: %s", error)
        await self._leave()
        logger.info("drained: this replica is no longer in the index")
