"""What only the Redis side has: keys, expiry, trimming, bad bytes, strict parsing, and being away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from cluster.config import IndexConfig
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, ReplicaInfo, ReplicaLoad, WorkerId
from cluster.index.base import MAX_CHUNKS_PER_ENTRY, IndexUnavailable, StreamPosition
from cluster.index.keys import IndexKeys
from cluster.index.private_server import PrivateRedis
from cluster.index.redis_client import connect
from cluster.index.redis_reader import RedisReader
from cluster.index.redis_writer import GRACE_TTLS, RedisWriter
from cluster.index.wire import (
    MAX_PAYLOAD_BYTES,
    BadPayload,
    decode_entry,
    decode_heartbeat,
    decode_info,
    encode_entry,
    encode_heartbeat,
    encode_info,
)

A = WorkerId("a")
CLEARED = CacheEvent(CacheEventKind.CLEARED)
MakeInfo = Callable[..., ReplicaInfo]
Chain = Callable[..., list[ChunkHash]]


def stored(*chunks: ChunkHash) -> CacheEvent:
    return CacheEvent(CacheEventKind.STORED, chunks)


@pytest.fixture
async def client(redis_server: PrivateRedis) -> AsyncIterator[Redis]:
    client = connect(redis_server.url, 1.0)
    yield client
    await client.aclose()


@pytest.fixture
def keys(index_config: IndexConfig) -> IndexKeys:
    return IndexKeys(prefix=index_config.key_prefix, model="org/model {1}")


def test_all_keys_of_a_model_have_one_hash_tag_and_models_never_share_a_key() -> None:
    models = ["m", "m}", "{m", "m:workers", "org/m", "org%2Fm", ""]
    seen: set[str] = set()
    for model in models:
        keys = IndexKeys(prefix="p", model=model)
        names = [keys.workers, keys.epoch, keys.events, keys.worker(A), keys.chunks(A), keys.beat(A)]
        assert len({name[name.index("{") : name.index("}") + 1] for name in names}) == 1
        assert all(name.startswith("p:1:{") for name in names)
        seen.update(names)
    assert len(seen) == 6 * len(models)


# --- strict parsing ---------------------------------------------------------------------------------------------


@given(payload=st.binary(max_size=200))
def test_no_bytes_make_a_decoder_raise_anything_else(payload: bytes) -> None:
    for decode in (decode_entry, decode_info, decode_heartbeat):
        try:
            decode(payload)
        except BadPayload:
            continue


_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=40)
@given(value=_plain)
def test_no_msgpack_makes_a_decoder_raise_anything_else(value: object) -> None:
    payload = msgpack.packb(value)
    for decode in (decode_entry, decode_info, decode_heartbeat):
        try:
            decode(payload)
        except BadPayload:
            continue


@pytest.mark.parametrize(
    "entry",
    [
        ["a", 1, 1],
        ["a", 1, 1, [], "more"],
        [7, 1, 1, []],
        ["a", -1, 1, []],
        ["a", True, 1, []],
        ["a", 1, 1.0, []],
        ["a", 1, 1, [["stored", b"x" * 15]]],
        ["a", 1, 1, [["stored", "x" * 16]]],
        ["a", 1, 1, [["exploded", b""]]],
        ["a", 1, 1, [["stored"]]],
        ["a", 1, 1, [["stored", b"x" * 16 * (MAX_CHUNKS_PER_ENTRY + 1)]]],
        ["a" * 2000, 1, 1, []],
    ],
)
def test_a_malformed_entry_is_refused(entry: object) -> None:
    with pytest.raises(BadPayload):
        decode_entry(msgpack.packb(entry))


def test_an_oversized_payload_is_refused_unparsed() -> None:
    with pytest.raises(BadPayload, match="limit"):
        decode_entry(b"\x90" * (MAX_PAYLOAD_BYTES + 1))
    with pytest.raises(ValueError, match="too much"):
        encode_entry(A, Epoch(1), 1, [stored(*[ChunkHash(bytes(16))] * (MAX_CHUNKS_PER_ENTRY + 1))])


def test_round_trips(make_info: MakeInfo, chain: Chain) -> None:
    events = (stored(*chain(3)), CacheEvent(CacheEventKind.REMOVED, tuple(chain(1))), CLEARED)
    entry = decode_entry(encode_entry(A, Epoch(2**60), 9, events))
    assert (entry.worker_id, entry.epoch, entry.seq, entry.events) == (A, 2**60, 9, events)
    assert decode_info(encode_info(make_info("a"))) == make_info("a")
    load = ReplicaLoad(waiting=3, uncached_tokens={"r": 1}, prefill_tokens_per_s=2.5)
    assert decode_heartbeat(encode_heartbeat(Epoch(5), load)).load == load


def test_a_heartbeat_of_a_newer_version_is_read() -> None:
    payload = msgpack.packb([5, {"waiting": 1, "from_the_future": [1, 2]}])
    assert decode_heartbeat(payload).load == ReplicaLoad(waiting=1)


# --- in Redis ---------------------------------------------------------------------------------------------------


@pytest.mark.redis
async def test_bad_bytes_in_redis_are_counted_and_skipped(
    redis_writer: RedisWriter, redis_reader: RedisReader, client: Redis, keys: IndexKeys, make_info: MakeInfo
) -> None:
    epoch = await redis_writer.register(make_info("a"))
    await redis_writer.publish(A, epoch, 1, [CLEARED])
    await client.xadd(keys.events, {"entry": b"\xc1 not msgpack"})
    await client.xadd(keys.events, {"something": b"else"})
    await redis_writer.publish(A, epoch, 2, [CLEARED])
    entries = await redis_reader.follow(StreamPosition(0, 0), 10)
    assert [None if entry is None else entry.seq for _, entry in entries] == [1, None, None, 2]
    assert redis_reader.bad_payloads == 2

    await client.hset(keys.worker(WorkerId("b")), mapping={"epoch": "1", "seq": "0", "info": b"?"})
    await client.hset(
        keys.worker(WorkerId("c")), mapping={"epoch": "x", "seq": "0", "info": encode_info(make_info("c"))}
    )
    await client.hset(
        keys.worker(WorkerId("d")), mapping={"epoch": "1", "seq": "0", "info": encode_info(make_info("z"))}
    )
    await client.sadd(keys.workers, "b", "c", "d", b"\xff")
    await client.set(keys.beat(A), b"?")
    await client.sadd(keys.chunks(A), b"short")
    assert list(await redis_reader.workers()) == [A]
    assert await redis_reader.heartbeats([A]) == {}
    assert await redis_reader.snapshot(A) is None
    assert redis_reader.bad_payloads == 7


@pytest.mark.redis
async def test_epochs_rise_even_when_the_servers_clock_goes_back(
    redis_writer: RedisWriter, client: Redis, keys: IndexKeys, make_info: MakeInfo
) -> None:
    ahead = 2_000_000_000_000_000
    await client.set(keys.epoch, ahead)
    assert await redis_writer.register(make_info("a")) == ahead + 1
    await redis_writer.deregister(A, Epoch(ahead + 1))
    assert await redis_writer.register(make_info("a")) == ahead + 2


@pytest.mark.redis
async def test_dead_workers_leave_nothing_in_redis(
    redis_writer: RedisWriter,
    client: Redis,
    keys: IndexKeys,
    index_config: IndexConfig,
    make_info: MakeInfo,
    chain: Chain,
) -> None:
    epoch = await redis_writer.register(make_info("a"))
    await redis_writer.publish(A, epoch, 1, [stored(*chain(2))])
    await redis_writer.heartbeat(A, epoch, ReplicaLoad())
    ttl_ms = int(index_config.heartbeat_ttl_s * 1000)
    assert 0 < await client.pttl(keys.beat(A)) <= ttl_ms
    for key in (keys.worker(A), keys.chunks(A)):
        assert ttl_ms < await client.pttl(key) <= ttl_ms * GRACE_TTLS
        await client.delete(key)  # as if it had expired
    await redis_writer.register(make_info("b"))
    assert await client.smembers(keys.workers) == {b"b"}


@pytest.mark.redis
async def test_the_stream_is_trimmed(
    redis_server: PrivateRedis, client: Redis, index_config: IndexConfig, keys: IndexKeys, make_info: MakeInfo
) -> None:
    config = index_config.model_copy(update={"stream_max_entries": 200})
    writer = RedisWriter(connect(redis_server.url, 1.0), keys, config)
    epoch = await writer.register(make_info("a"))
    for seq in range(1, 601):
        await writer.publish(A, epoch, seq, [CLEARED])
    assert 200 <= await client.xlen(keys.events) < 400
    await writer.close()


@pytest.mark.redis
async def test_a_snapshot_taken_while_others_publish_is_of_one_instant(
    redis_writer: RedisWriter, redis_reader: RedisReader, make_info: MakeInfo, chain: Chain
) -> None:
    chunks = chain(200)
    epoch = await redis_writer.register(make_info("a"))

    async def publish() -> None:
        for seq, chunk in enumerate(chunks, start=1):
            await redis_writer.publish(A, epoch, seq, [stored(chunk)])

    publishing = asyncio.create_task(publish())
    sizes = []
    while not publishing.done():
        snapshot = await redis_reader.snapshot(A)
        assert snapshot is not None
        assert {chunk for batch in snapshot.batches() for chunk in batch} == set(chunks[: snapshot.seq])
        sizes.append(snapshot.seq)
    await publishing
    assert len(set(sizes)) > 5


@pytest.mark.redis
async def test_scripts_come_back_after_the_server_forgot_them(
    redis_writer: RedisWriter, client: Redis, make_info: MakeInfo
) -> None:
    first = await redis_writer.register(make_info("a"))
    await client.script_flush()
    assert await redis_writer.register(make_info("a")) > first


@pytest.mark.redis
async def test_server_errors_mean_unavailable(
    redis_writer: RedisWriter, redis_reader: RedisReader, client: Redis, keys: IndexKeys, make_info: MakeInfo
) -> None:
    await client.set(keys.workers, "not a set")
    await client.set(keys.events, "not a stream")
    with pytest.raises(IndexUnavailable):
        await redis_writer.register(make_info("a"))
    with pytest.raises(IndexUnavailable):
        await redis_reader.workers()
    with pytest.raises(IndexUnavailable):
        await redis_reader.follow(StreamPosition(0, 0), 1)


async def test_nobody_listening_is_unavailable_at_once(index_config: IndexConfig, make_info: MakeInfo) -> None:
    url = "redis://127.0.0.1:1/0"
    writer, reader = RedisWriter.open(index_config, url, "m"), RedisReader.open(index_config, url, "m")
    with pytest.raises(IndexUnavailable):
        await writer.register(make_info("a"))
    with pytest.raises(IndexUnavailable):
        await reader.workers()
    await writer.close()
    await reader.close()


async def test_a_server_that_never_answers_is_unavailable_after_the_timeout(index_config: IndexConfig) -> None:
    held: list[asyncio.StreamWriter] = []

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    config = index_config.model_copy(update={"timeout_s": 0.2})
    reader = RedisReader.open(config, f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", "m")
    started = time.monotonic()
    with pytest.raises(IndexUnavailable):
        await reader.workers()
    assert time.monotonic() - started < 2
    await reader.close()
    for writer in held:
        writer.close()
    server.close()
    await server.wait_closed()
