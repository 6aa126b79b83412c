"""TokenCall: one attempt at a replica, seen from the router: what came, by whichever way, and how it ended.

Two things happen to a call: the Serve call says that it failed or ended, and deltas come, over the token channel or as
items of the Serve call. They travel on different sockets, so the end may arrive before the last tokens.

Owns: the queue of one attempt, and deciding from both sides whether more can come.
Does not: call replicas (serve_dispatcher) or hold sockets (token_channels).
Invariants: used on one event loop; deltas come out in the order they were put; what was put before a failure comes out
before it; nobody waits for ever for tokens of a call that ended or of a channel that broke.
"""

from __future__ import annotations

import asyncio
from collections import deque

from cluster.core.errors import ReplicaLost
from cluster.core.replica import WorkerId
from cluster.core.request import TokenDelta

# How long the other side may lag behind: tokens behind the end of the Serve call, or Serve's word on why the channel
# broke, which knows whether the replica died.
GRACE_S = 5.0


class TokenCall:
    """`next` is for one reader; the rest is told by the Serve call and by the channel."""

    def __init__(self, number: int, request_id: str, *, grace_s: float = GRACE_S) -> None:
        self.number = number
        self.request_id = request_id
        self._grace_s = grace_s
        self._deltas: deque[tuple[WorkerId, TokenDelta]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._channel_of: WorkerId | None = None
        self._answered = self._over = self._broken = False
        self._error: BaseException | None = None

    def put(self, worker_id: WorkerId, delta: TokenDelta) -> None:
        self._deltas.append((worker_id, delta))
        self._wake()

    def put_from_channel(self, worker_id: WorkerId, delta: TokenDelta) -> None:
        self._channel_of = worker_id
        self.put(worker_id, delta)

    def answered(self) -> None:
        """The replica says that it put the whole answer into the channel."""
        self._answered = True
        self._wake()

    def over(self, error: BaseException | None = None) -> None:
        """The Serve call ended."""
        self._over, self._error = True, error
        self._wake()

    def channel_broke(self, worker_id: WorkerId) -> None:
        """Means something only to a call whose tokens came that way."""
        if self._channel_of == worker_id:
            self._broken = True
            self._wake()

    async def next(self) -> tuple[WorkerId, TokenDelta] | None:
        """The next delta; None when the Serve call ended and promised no more. Raises the Serve call's failure."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._over and not self._answered:
                return None
            late = self._answered or self._broken
            if (self._answered and self._broken) or not await self._wait(self._grace_s if late else None):
                known = {} if self._channel_of is None else {"worker_id": self._channel_of}
                raise ReplicaLost("the token channel broke before the answer was complete", dead=False, **known)
        return self._deltas.popleft()

    async def _wait(self, timeout_s: float | None) -> bool:
        """Until something happens; False when nothing did in time."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            if timeout_s is None:
                await self._waiter
            else:
                async with asyncio.timeout(timeout_s):
                    await self._waiter
        except TimeoutError:
            return False
        finally:
            self._waiter = None
        return True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
