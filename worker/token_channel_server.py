"""TokenChannelServer: the replica's end of the token channel: who is connected, and one message per step to each.

Owns: the listening sockets, the secret, the connections and what waits to be written to them.
Does not: know requests or the engine; a caller opens a sink per request and puts deltas into it.
Invariants: nobody gets a token before the secret was right; nothing here waits for a router: one that does not read
loses its connection and its own requests, once `max_buffer_bytes` wait for it; everything put in one turn of the event
loop leaves as one message.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import sys
from typing import Any, cast

from cluster.core.errors import ReplicaLost
from cluster.core.request import TokenDelta
from cluster.framing import MessagePacker, MessageReader
from cluster.token_channel import HANDSHAKE_TIMEOUT_S, MAX_BUFFER_BYTES, PROTOCOL, ChannelOffer, delta_to_wire

logger = logging.getLogger(__name__)

_MAX_HELLO_BYTES = 4096


class TokenChannelServer:
    """`start` before `sink`; both on the event loop that will use the sinks."""

    def __init__(self, worker_id: str, *, max_buffer_bytes: int = MAX_BUFFER_BYTES) -> None:
        self.worker_id = worker_id
        self.max_buffer_bytes = max_buffer_bytes
        self.offer: ChannelOffer | None = None
        self._secret = secrets.token_hex(32)
        self._servers: list[asyncio.Server] = []
        self._connections: set[_RouterConnection] = set()
        self._routers: dict[str, _RouterConnection] = {}

    async def start(self, host: str) -> None:
        """Listen on `host` and, on Linux, for routers of this machine. A failure leaves the offer None."""
        unix, port = await self._listen_here(), 0
        try:
            server = await asyncio.get_running_loop().create_server(self._connection, host, 0)
            self._servers.append(server)
            port = server.sockets[0].getsockname()[1]
        except OSError as error:
            logger.info("no token channel on %s: %s", host, error)
        if unix or port:
            self.offer = ChannelOffer(unix=unix, host=host, port=port, secret=self._secret)
        else:
            logger.warning("the token channel cannot listen; all tokens go through Serve, which costs more CPU")

    def sink(self, router_id: str, call: int) -> ChannelSink | None:
        """Where the deltas of a router's call go; None while the router is not connected."""
        connection = self._routers.get(router_id)
        return None if connection is None else ChannelSink(connection, call)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.end()

    def authenticate(self, connection: _RouterConnection, hello: Any) -> bool:
        """Takes the connection in when its first message is right."""
        if not isinstance(hello, list) or len(hello) != 3 or not all(isinstance(part, str) for part in hello):
            return False
        protocol, secret, router_id = hello
        if not hmac.compare_digest(secret.encode(), self._secret.encode()) or protocol != PROTOCOL:
            return False
        self._routers[router_id] = connection  # a router that connects again uses its new connection from now on
        return True

    def forget(self, connection: _RouterConnection) -> None:
        self._connections.discard(connection)
        self._routers = {name: known for name, known in self._routers.items() if known is not connection}

    def _connection(self) -> _RouterConnection:
        connection = _RouterConnection(self)
        self._connections.add(connection)
        return connection

    async def _listen_here(self) -> str:
        """The name in the abstract namespace, which needs no file and ends with the process; "" where there is none."""
        if sys.platform != "linux":
            return ""
        name = f"kvray-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(f"\0{name}")
            server = await asyncio.get_running_loop().create_unix_server(self._connection, sock=listener)
        except OSError as error:
            listener.close()
            logger.info("no token channel for routers of this machine: %s", error)
            return ""
        self._servers.append(server)
        return name


class _RouterConnection(asyncio.Protocol):
    """One router. Before its secret was right it is nobody and gets nothing."""

    def __init__(self, server: TokenChannelServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._reader = MessageReader(_MAX_HELLO_BYTES)
        self._packer = MessagePacker()
        self._known = False
        self._pending: list[list[Any]] = []
        self.sinks: set[ChannelSink] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._deadline = self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            messages = self._reader.take()
        except Exception:  # msgpack has many ways to say that these are no messages
            messages = [None]
        for message in messages:
            if self._known or not self._server.authenticate(self, message):
                logger.warning("a connection to the token channel is closed: its first message was wrong")
                self._transport.abort()
                return
            self._known = True
            self._deadline.cancel()
            self._transport.write(self._packer.pack([PROTOCOL, self._server.worker_id]))

    def put(self, wire: list[Any]) -> None:
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(wire)

    def end(self) -> None:
        """Close once what was put is written."""
        self._flush()
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.cancel()
        self._pending.clear()
        self._server.forget(self)
        for sink in list(self.sinks):
            sink.break_off()

    def _flush(self) -> None:
        if not self._pending or self._transport.is_closing():
            return
        self._transport.write(self._packer.pack(self._pending))
        self._pending.clear()
        if self._transport.get_write_buffer_size() > self._server.max_buffer_bytes:
            logger.warning("a router does not read its tokens: its connection is closed, and its requests end")
            self._transport.abort()


class ChannelSink:
    """The deltas of one call, to the router that made it."""

    def __init__(self, connection: _RouterConnection, call: int) -> None:
        self._connection = connection
        self._call = call
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        connection.sinks.add(self)

    def put(self, delta: TokenDelta) -> None:
        if self._ended.done():
            return
        self._connection.put(delta_to_wire(self._call, delta))
        if delta.last:
            self._ended.set_result(None)

    async def ended(self) -> None:
        await self._ended

    def close(self) -> None:
        self._connection.sinks.discard(self)

    def break_off(self) -> None:
        if not self._ended.done():
            self._ended.set_exception(ReplicaLost("the token channel to the router broke", dead=False))
            self._ended.exception()  # retrieved, should nobody wait for it
