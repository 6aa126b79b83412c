"""What only the Redis side has: keys, expiry, trimming, bad bytes, strict parsing, and being away."""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from replica_infos import replica_info

from cluster.config import IndexConfig
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, ReplicaInfo, ReplicaLoad, WorkerId
from cluster.index.base import MAX_CHUNKS_PER_ENTRY, Fenced, IndexUnavailable, StreamPosition
from cluster.index.keys import IndexKeys
from cluster.index.private_server import PrivateRedis
from cluster.index.redis_client import connect
from cluster.index.redis_link import PinnedScripts, RedisLink
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


def checked(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(4, "little") + body


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


_hashes = st.lists(st.binary(min_size=16, max_size=16).map(ChunkHash), max_size=6).map(tuple)
_events = st.lists(st.builds(CacheEvent, st.sampled_from(CacheEventKind), _hashes), max_size=4)
_mutations = st.lists(
    st.tuples(st.sampled_from(["flip", "drop", "insert", "cut", "double"]), st.floats(0, 1), st.integers(0, 255)),
    min_size=1,
    max_size=4,
)


def mutated(payload: bytes, mutations: list[tuple[str, float, int]]) -> bytes:
    changed = bytearray(payload)
    for kind, where, value in mutations:
        at = int(where * len(changed))
        if kind == "flip" and changed:
            changed[min(at, len(changed) - 1)] ^= value
        elif kind == "drop":
            del changed[at : at + 1]
        elif kind == "insert":
            changed.insert(at, value)
        elif kind == "cut":
            del changed[at:]
        elif kind == "double":
            changed += changed[at:]
    return bytes(changed)


@given(events=_events, seq=st.integers(0, 2**63 - 1), mutations=_mutations)
def test_a_mutated_entry_is_refused_or_is_still_the_same(
    events: list[CacheEvent], seq: int, mutations: list[tuple[str, float, int]]
) -> None:
    payload = encode_entry(A, Epoch(2**50), seq, events)
    changed = mutated(payload, mutations)
    try:
        entry = decode_entry(changed)
    except BadPayload:
        assert changed != payload
    else:
        assert changed == payload
        assert (entry.seq, entry.events) == (seq, tuple(events))


@given(events=_events, mutations=_mutations)
def test_a_mutated_entry_with_a_right_checksum_raises_nothing_else(
    events: list[CacheEvent], mutations: list[tuple[str, float, int]]
) -> None:
    """The strict parsing behind the checksum: what it lets through is within every bound."""
    body = encode_entry(A, Epoch(2**50), 3, events)[4:]
    try:
        entry = decode_entry(checked(mutated(body, mutations)))
    except BadPayload:
        return
    assert 0 <= entry.seq < 2**63
    assert 0 <= entry.epoch < 2**63
    assert all(len(chunk) == 16 for event in entry.events for chunk in event.chunk_hashes)


@given(mutations=_mutations, load=st.integers(0, 2**40))
def test_mutated_registrations_and_heartbeats_raise_nothing_else(
    mutations: list[tuple[str, float, int]], load: int
) -> None:
    info = replica_info("a")
    beat = encode_heartbeat(Epoch(2**50), ReplicaLoad(waiting=load, uncached_tokens={"r": load}, step_time_s=0.5))
    for payload, decode in ((encode_info(info), decode_info), (beat, decode_heartbeat)):
        try:
            decode(mutated(payload, mutations))
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
        decode_entry(checked(msgpack.packb(entry)))


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
    assert len(await redis_reader.snapshot(A) or ()) == 0  # without the member that is no hash
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
async def test_a_workers_epochs_rise_on_a_server_that_never_heard_of_the_last_one(
    redis_writer: RedisWriter, client: Redis, keys: IndexKeys, make_info: MakeInfo
) -> None:
    first = await redis_writer.register(make_info("a"))
    await client.delete(keys.epoch)
    ahead = Epoch(first + 10**9)
    assert await redis_writer.register(make_info("a"), ahead) == ahead + 1


@pytest.mark.redis
async def test_a_heartbeat_tells_a_server_that_lost_entries(redis_writer: RedisWriter, make_info: MakeInfo) -> None:
    """A replica that lags took over, and the worker has nothing to publish: its beat finds out."""
    epoch = await redis_writer.register(make_info("a"))
    await redis_writer.publish(A, epoch, 1, [CLEARED])
    await redis_writer.heartbeat(A, epoch, ReplicaLoad(), 1)
    with pytest.raises(Fenced):
        await redis_writer.heartbeat(A, epoch, ReplicaLoad(), 2)


@pytest.mark.redis
async def test_a_snapshot_ends_when_its_connection_or_its_life_does(
    redis_writer: RedisWriter,
    redis_reader: RedisReader,
    client: Redis,
    make_info: MakeInfo,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cursor must not be taken to another server or another life."""
    epoch = await redis_writer.register(make_info("a"))
    for seq in range(1, 9):
        chunks = [ChunkHash((1000 * seq + n).to_bytes(16, "big")) for n in range(1000)]
        await redis_writer.publish(A, epoch, seq, [stored(*chunks)])
    run, pages = PinnedScripts.run, 0
    after_first_page: list[Callable[[], Awaitable[object]]] = []

    async def counted(self: PinnedScripts, script: str, keys: Any, args: Any = ()) -> Any:
        nonlocal pages
        answer = await run(self, script, keys, args)
        pages += 1
        if after_first_page:
            await after_first_page.pop()()
        return answer

    monkeypatch.setattr(PinnedScripts, "run", counted)
    after_first_page.append(lambda: client.client_kill_filter(_type="normal", skipme=True))
    with pytest.raises(IndexUnavailable):
        await redis_reader.snapshot(A)
    after_first_page.append(lambda: redis_writer.register(make_info("a")))
    assert await redis_reader.snapshot(A) is None
    assert pages == 3


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
    writer = RedisWriter(RedisLink(redis_server.url, 1.0), keys, config)
    epoch = await writer.register(make_info("a"))
    for seq in range(1, 601):
        await writer.publish(A, epoch, seq, [CLEARED])
    assert 200 <= await client.xlen(keys.events) < 400
    await writer.close()


def change(held: set[ChunkHash], event: CacheEvent) -> None:
    if event.kind is CacheEventKind.STORED:
        held.update(event.chunk_hashes)
    elif event.kind is CacheEventKind.REMOVED:
        held.difference_update(event.chunk_hashes)
    else:
        held.clear()


class PublishedTruth:
    """What was published in one life, and what was held after each entry."""

    def __init__(self, writer: RedisWriter, epoch: Epoch) -> None:
        self.writer, self.epoch, self.seq = writer, epoch, 0
        self.rng = random.Random(5)
        self.held: set[ChunkHash] = set()
        self.events: dict[int, CacheEvent] = {}
        self.after: dict[int, frozenset[ChunkHash]] = {}

    async def publish(self, event: CacheEvent) -> None:
        await self.writer.publish(A, self.epoch, self.seq + 1, [event])
        change(self.held, event)
        self.seq += 1
        self.events[self.seq], self.after[self.seq] = event, frozenset(self.held)

    async def change_for_ever(self) -> None:
        while True:
            kind = self.rng.random()
            if kind < 0.48 or len(self.held) < 10_000:
                await self.publish(stored(*(ChunkHash(self.rng.randbytes(16)) for _ in range(500))))
            elif kind < 0.96:
                some = tuple(self.rng.sample(sorted(self.held), 500))
                await self.publish(CacheEvent(CacheEventKind.REMOVED, some))
            else:
                await self.publish(CLEARED)


@pytest.mark.redis
async def test_a_small_snapshot_is_of_one_instant(
    redis_writer: RedisWriter, redis_reader: RedisReader, make_info: MakeInfo, chain: Chain
) -> None:
    chunks = chain(200)
    epoch = await redis_writer.register(make_info("a"))

    async def publish() -> None:
        for seq, chunk in enumerate(chunks, start=1):
            await redis_writer.publish(A, epoch, seq, [stored(chunk)])

    publishing = asyncio.create_task(publish())
    seqs = []
    while not publishing.done():
        snapshot = await redis_reader.snapshot(A)
        assert snapshot is not None
        assert snapshot.settled == snapshot.seq
        assert {chunk for batch in snapshot.batches() for chunk in batch} == set(chunks[: snapshot.seq])
        seqs.append(snapshot.seq)
    await publishing
    assert len(set(seqs)) > 5


@pytest.mark.redis
async def test_a_paged_snapshot_is_exact_once_the_entries_up_to_settled_are_applied(
    redis_writer: RedisWriter, redis_reader: RedisReader, make_info: MakeInfo
) -> None:
    """Scenarios 17 and 19: the set changes and its table is rebuilt while its pages are read."""
    truth = PublishedTruth(redis_writer, await redis_writer.register(make_info("a")))
    for _ in range(40):
        await truth.publish(stored(*(ChunkHash(truth.rng.randbytes(16)) for _ in range(1000))))
    changing = asyncio.create_task(truth.change_for_ever())
    paged = 0
    try:
        for _ in range(12):
            snapshot = await redis_reader.snapshot(A)
            assert snapshot is not None
            found = {chunk for batch in snapshot.batches() for chunk in batch}
            while truth.seq < snapshot.settled:  # the server has it, but the answer is still on its way here
                await asyncio.sleep(0)
            for seq in range(snapshot.seq + 1, snapshot.settled + 1):
                change(found, truth.events[seq])
            assert found == truth.after[snapshot.settled]
            paged += snapshot.settled > snapshot.seq
    finally:
        changing.cancel()
    assert paged >= 6


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
