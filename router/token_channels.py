"""TokenChannels: this router's connections to the replicas' token channels, and the calls whose tokens they bring.

Owns: numbering the live calls, connecting to the replicas that offer a channel, and handing deltas to calls.
Does not: make Serve calls (serve_dispatcher) or decide when a call ends (token_call).
Invariants: connecting happens beside the requests, never in front of one; without a connection nothing is lost but
speed, because the replica then answers through Serve; a replica that cannot be reached is tried again at most every
`RETRY_S`, with one warning for all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from cluster.core.replica import WorkerId
from cluster.framing import MessagePacker, MessageReader
from cluster.token_channel import HANDSHAKE_TIMEOUT_S, MAX_MESSAGE_BYTES, PROTOCOL, ChannelOffer, delta_from_wire
from router.token_call import TokenCall

logger = logging.getLogger(__name__)

RETRY_S = 30.0


class TokenChannels:
    """Create and use on one event loop. `router_id`: the one in this router's requests."""

    def __init__(self, router_id: str) -> None:
        self._router_id = router_id
        self._calls: dict[int, TokenCall] = {}
        self._numbers = itertools.count(1)
        self._links: dict[WorkerId, _ReplicaLink] = {}
        self._tasks: dict[WorkerId, asyncio.Task[None]] = {}
        self._retry_at: dict[WorkerId, float] = {}
        self._warned = False

    @property
    def connected(self) -> set[WorkerId]:
        return set(self._links)

    @contextmanager
    def call(self, request_id: str) -> Iterator[TokenCall]:
        """A call that gets deltas inside the block; what comes later is dropped."""
        call = TokenCall(next(self._numbers), request_id)
        self._calls[call.number] = call
        try:
            yield call
        finally:
            del self._calls[call.number]

    def learn(self, worker_id: WorkerId, offer: ChannelOffer) -> None:
        """A replica answered through Serve and says where its channel is: connect, unless that was tried just now."""
        now = time.monotonic()
        if worker_id in self._links or worker_id in self._tasks or self._retry_at.get(worker_id, now) > now:
            return
        self._retry_at = {known: at for known, at in self._retry_at.items() if at > now}
        self._tasks[worker_id] = asyncio.create_task(self._connect(worker_id, offer))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in list(self._links.values()):
            link.end()

    def deliver(self, worker_id: WorkerId, deltas: list[list[Any]]) -> None:
        for wire in deltas:
            call = self._calls.get(wire[0])
            if call is not None:
                call.put_from_channel(worker_id, delta_from_wire(call.request_id, wire))

    def lost(self, link: _ReplicaLink) -> None:
        if self._links.get(link.worker_id) is link:
            del self._links[link.worker_id]
        for call in self._calls.values():
            call.channel_broke(link.worker_id)

    async def _connect(self, worker_id: WorkerId, offer: ChannelOffer) -> None:
        try:
            async with asyncio.timeout(2 * HANDSHAKE_TIMEOUT_S):
                link = await self._connect_here(worker_id, offer) or await self._connect_there(worker_id, offer)
                try:
                    await link.welcome
                except BaseException:
                    link.end()
                    raise
            if not link.gone:
                self._links[worker_id] = link
        except (OSError, TimeoutError) as error:
            self._retry_at[worker_id] = time.monotonic() + RETRY_S
            if not self._warned:
                self._warned = True
                logger.warning(
                    "no token channel to %s (%s port %d): %s; tokens come through Serve, which costs more CPU",
                    *(worker_id, offer.host, offer.port, error or "timeout"),
                )
        finally:
            self._tasks.pop(worker_id, None)

    async def _connect_here(self, worker_id: WorkerId, offer: ChannelOffer) -> _ReplicaLink | None:
        """Over the abstract namespace; None when the replica is on another machine, where its name is unknown."""
        if not offer.unix:
            return None
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, f"\0{offer.unix}")
            link = _ReplicaLink(self, worker_id, offer.secret, self._router_id)
            await loop.create_unix_connection(lambda: link, sock=sock)
        except OSError:
            sock.close()
            return None
        return link

    async def _connect_there(self, worker_id: WorkerId, offer: ChannelOffer) -> _ReplicaLink:
        if not offer.port:
            raise ConnectionRefusedError("the replica listens for its own machine only")
        link = _ReplicaLink(self, worker_id, offer.secret, self._router_id)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await asyncio.get_running_loop().create_connection(lambda: link, offer.host, offer.port)
        return link


class _ReplicaLink(asyncio.Protocol):
    """One connection. `welcome` is done once the replica accepted it."""

    def __init__(self, channels: TokenChannels, worker_id: WorkerId, secret: str, router_id: str) -> None:
        self.worker_id = worker_id
        self.welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gone = False
        self._channels = channels
        self._hello = MessagePacker().pack([PROTOCOL, secret, router_id])
        self._reader = MessageReader(MAX_MESSAGE_BYTES)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._hello)

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            for message in self._reader.take():
                if self.welcome.done():
                    self._channels.deliver(self.worker_id, message)
                elif message != [PROTOCOL, self.worker_id]:
                    raise ValueError("not the replica that made the offer")
                else:
                    self.welcome.set_result(None)
        except Exception as error:
            logger.warning("the token channel of %s is closed: this is no token message: %s", self.worker_id, error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = True
        if not self.welcome.done():
            self.welcome.set_exception(ConnectionRefusedError("the replica closed the connection"))
            self.welcome.exception()  # retrieved, should nobody wait for it any more
        self._channels.lost(self)

    def end(self) -> None:
        self._transport.close()
