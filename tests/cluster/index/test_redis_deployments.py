"""The index behind a password, TLS, Sentinels and in a cluster: the same writer, reader and follower work."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from cluster.config import IndexConfig
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import ReplicaInfo, WorkerId
from cluster.free_ports import free_ports
from cluster.index.base import IndexUnavailable
from cluster.index.follower import FollowerState, IndexFollower
from cluster.index.memory import MemoryIndex
from cluster.index.private_server import PrivateRedis
from cluster.index.redis_client import connect
from cluster.index.redis_reader import RedisReader
from cluster.index.redis_writer import RedisWriter
from worker.cache_reporter import CacheReporter

pytestmark = pytest.mark.redis

MODEL = "org/model {1}"
PASSWORD = "s3cret/@:"
QUOTED = "s3cret%2F%40%3A"
MakeInfo = Callable[..., ReplicaInfo]
Chain = Callable[..., list[ChunkHash]]
Eventually = Callable[..., Awaitable[None]]


def stored(*chunks: ChunkHash) -> CacheEvent:
    return CacheEvent(CacheEventKind.STORED, chunks)


class Pair:
    """A worker and a router at one URL."""

    def __init__(self, url: str, config: IndexConfig, info: ReplicaInfo) -> None:
        self.writer = RedisWriter.open(config, url, MODEL)
        self.reader = RedisReader.open(config, url, MODEL)
        self.reporter = CacheReporter(self.writer, info, config)
        self.index = MemoryIndex()
        self.follower = IndexFollower(self.reader, self.index, config, info.route_digest)

    async def start(self) -> None:
        await self.reporter.start()
        await self.follower.start()

    def holds(self, prompt: list[ChunkHash], count: int) -> Callable[[], bool]:
        return lambda: (
            self.index.overlaps(prompt) == {WorkerId("a"): count} and self.follower.workers[WorkerId("a")].in_step
        )

    async def close(self) -> None:
        await self.reporter.close()
        await self.follower.close()
        await self.writer.close()
        await self.reader.close()


async def ask(client: Redis, *command: str | int | bytes | None) -> Any:
    return await client.execute_command(*command)  # type: ignore[no-untyped-call]


MakePair = Callable[[str], Awaitable[Pair]]


@pytest.fixture
async def make_pair(index_config: IndexConfig, make_info: MakeInfo) -> AsyncIterator[MakePair]:
    pairs: list[Pair] = []

    async def make(url: str) -> Pair:
        pair = Pair(url, index_config, make_info("a"))
        pairs.append(pair)
        await pair.start()
        return pair

    yield make
    for pair in pairs:
        await pair.close()


async def works(pair: Pair, prompt: list[ChunkHash], eventually: Eventually) -> None:
    """Registration, events, a heartbeat's load, and a snapshot of more than one page."""
    pair.reporter.record([stored(*prompt[:-1])])
    await eventually(pair.holds(prompt, len(prompt) - 1))
    pair.reporter.record([stored(prompt[-1])])
    await eventually(pair.holds(prompt, len(prompt)))
    snapshot = await pair.reader.snapshot(WorkerId("a"))
    assert snapshot is not None
    assert len(snapshot.pages) > 1
    assert {chunk for batch in snapshot.batches() for chunk in batch} == set(prompt)
    assert pair.follower.state is FollowerState.FOLLOWING


# --- a password -------------------------------------------------------------------------------------------------


async def test_a_password_is_used_and_never_logged(
    make_pair: MakePair,
    index_config: IndexConfig,
    chain: Chain,
    eventually: Eventually,
    server_program: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    with PrivateRedis(program=server_program) as server:
        admin = connect(server.url, 1.0)
        await admin.config_set("requirepass", PASSWORD)
        await admin.aclose()
        url = f"redis://:{QUOTED}@127.0.0.1:{server.port}/0"
        pair = await make_pair(url)
        await works(pair, chain(5000), eventually)
        for wrong in ("", ":wrong@"):
            reader = RedisReader.open(index_config, f"redis://{wrong}127.0.0.1:{server.port}/0", MODEL)
            with pytest.raises(IndexUnavailable) as raised:
                await reader.workers()
            assert "wrong" not in raised.value.message.replace("WRONGPASS", "")
            await reader.close()
        await pair.close()
    assert PASSWORD not in caplog.text
    assert QUOTED not in caplog.text
    assert QUOTED not in repr(index_config.model_copy(update={"redis_url": url}))


# --- TLS --------------------------------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    made, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(made)]
    subprocess.run([*command, *names], check=True, capture_output=True)
    return made


async def test_tls_checks_the_certificate(
    make_pair: MakePair,
    index_config: IndexConfig,
    certificate: Path,
    chain: Chain,
    eventually: Eventually,
    redis_server: PrivateRedis,
) -> None:
    """The wheel's server has no TLS of its own: something that ends TLS stands before it."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    pumps: set[asyncio.Task[None]] = set()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        except (OSError, ssl.SSLError):
            pass
        finally:
            sink.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", redis_server.port)
        for task in (pump(reader, inner_writer), pump(inner_reader, writer)):
            pumps.add(asyncio.create_task(task))

    front = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context)
    port = front.sockets[0].getsockname()[1]
    pair = await make_pair(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}")
    await works(pair, chain(5000), eventually)
    stranger = RedisReader.open(index_config, f"rediss://127.0.0.1:{port}/0", MODEL)
    with pytest.raises(IndexUnavailable, match="certificate"):
        await stranger.workers()
    await stranger.close()
    await pair.close()
    front.close()
    for task in pumps:
        task.cancel()
    await asyncio.gather(*pumps, return_exceptions=True)


# --- Sentinels --------------------------------------------------------------------------------------------------


@pytest.fixture
def sentinel(server_program: Path, tmp_path: Path) -> Iterator[tuple[PrivateRedis, PrivateRedis, int]]:
    """A master, its replica, and one Sentinel that alone may decide."""
    with ExitStack() as stack:
        master = stack.enter_context(PrivateRedis(program=server_program))
        replica = stack.enter_context(
            PrivateRedis(program=server_program, arguments=["--replicaof", f"127.0.0.1 {master.port}"])
        )
        (port,) = free_ports(1)
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n"
            f"sentinel monitor main 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds main 400\nsentinel failover-timeout main 2000\n"
        )
        process = subprocess.Popen([str(server_program), str(config), "--sentinel"], stdout=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        yield master, replica, port


async def test_sentinels_and_their_failover(
    sentinel: tuple[PrivateRedis, PrivateRedis, int], make_pair: MakePair, chain: Chain, eventually: Eventually
) -> None:
    """The master is killed; the replica takes over, and worker and router end in agreement there."""
    master, replica, port = sentinel
    prompt = chain(5000)
    asking = connect(f"redis://127.0.0.1:{port}", 1.0)
    seen: dict[bytes | str, object] = {}

    async def replicas() -> None:
        while seen.get("known") != 1:
            try:
                answer = await ask(asking, "SENTINEL", "REPLICAS", "main")
                seen["known"] = len(answer)
            except (OSError, RedisError):  # it is not up yet
                seen["known"] = 0
            await asyncio.sleep(0.05)

    await asyncio.wait_for(replicas(), 30)
    await asking.aclose()
    pair = await make_pair(f"redis+sentinel://127.0.0.1:{port}/main/0")
    await works(pair, prompt, eventually)
    first = pair.reporter.epoch
    await asyncio.to_thread(master.stop)
    pair.reporter.record([CacheEvent(CacheEventKind.REMOVED, tuple(reversed(prompt[100:])))])
    await eventually(lambda: pair.follower.state is FollowerState.UNREACHABLE)
    await eventually(pair.holds(prompt, 100), 40)
    promoted = connect(replica.url, 1.0)
    assert (await promoted.info("replication"))["role"] == "master"
    await promoted.aclose()
    assert pair.reporter.epoch is not None
    assert first is not None
    assert pair.reporter.epoch >= first
    await pair.close()


# --- a cluster --------------------------------------------------------------------------------------------------


@pytest.fixture
async def cluster_nodes(server_program: Path, tmp_path: Path) -> AsyncIterator[list[PrivateRedis]]:
    """Two nodes with half of the slots each."""
    with ExitStack() as stack:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port"]
        nodes = [
            stack.enter_context(PrivateRedis(program=server_program, arguments=[*options, str(free_ports(1)[0])]))
            for _ in range(2)
        ]
        clients = [connect(node.url, 2.0) for node in nodes]
        for client, (low, high) in zip(clients, ((0, 8191), (8192, 16383)), strict=True):
            await ask(client, "CLUSTER", "ADDSLOTSRANGE", low, high)
        bus = (await clients[1].config_get("cluster-port"))["cluster-port"]
        await ask(clients[0], "CLUSTER", "MEET", "127.0.0.1", nodes[1].port, bus)

        async def joined() -> None:
            while not all([b"cluster_state:ok" in await raw_info(client) for client in clients]):
                await asyncio.sleep(0.05)

        await asyncio.wait_for(joined(), 30)
        yield nodes
        for client in clients:
            await client.aclose()


async def raw_info(client: Redis) -> bytes:
    client.response_callbacks.pop("CLUSTER INFO", None)
    answer = await ask(client, "CLUSTER INFO")
    return answer if isinstance(answer, bytes) else json.dumps(answer).replace('": "', ":").encode()


@pytest.mark.parametrize("scheme", ["redis+cluster", "redis"])
@pytest.mark.parametrize("asked", [0, 1])
async def test_a_cluster_through_any_node_and_by_either_scheme(
    cluster_nodes: list[PrivateRedis],
    make_pair: MakePair,
    chain: Chain,
    eventually: Eventually,
    scheme: str,
    asked: int,
) -> None:
    """A plain URL of a node that does not serve the model's slot becomes a cluster's client by itself."""
    pair = await make_pair(f"{scheme}://127.0.0.1:{cluster_nodes[asked].port}/0")
    await works(pair, chain(5000), eventually)
    holders = []
    for node in cluster_nodes:
        client = connect(node.url, 1.0)
        holders.append(await client.dbsize())
        await client.aclose()
    assert sorted(holders) == [0, 6]  # all keys of the model in one slot
    assert set(await pair.reader.heartbeats([WorkerId("a"), WorkerId("b")])) == {WorkerId("a")}
    await pair.close()
