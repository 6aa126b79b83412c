"""One contract for the shared index, held against Redis and against the tests' FakeStore alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, ReplicaInfo, ReplicaLoad, WorkerId
from cluster.index.base import (
    Fenced,
    Heartbeat,
    IndexEntry,
    IndexReader,
    IndexWriter,
    RegistrationGone,
    StreamPosition,
)

A = WorkerId("a")
LOAD = ReplicaLoad(waiting=2, uncached_tokens={"router-1": 512}, step_time_s=0.25, free_blocks=7)
CLEARED = CacheEvent(CacheEventKind.CLEARED)
MakeInfo = Callable[..., ReplicaInfo]
Chain = Callable[..., list[ChunkHash]]


def stored(*chunks: ChunkHash) -> CacheEvent:
    return CacheEvent(CacheEventKind.STORED, chunks)


def removed(*chunks: ChunkHash) -> CacheEvent:
    return CacheEvent(CacheEventKind.REMOVED, chunks)


@pytest.fixture(params=["fake", pytest.param("redis", marks=pytest.mark.redis)])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def writer(backend: str, request: pytest.FixtureRequest) -> IndexWriter:
    writer: IndexWriter = request.getfixturevalue("fake_store" if backend == "fake" else "redis_writer")
    return writer


@pytest.fixture
def reader(backend: str, request: pytest.FixtureRequest) -> IndexReader:
    reader: IndexReader = request.getfixturevalue("fake_store" if backend == "fake" else "redis_reader")
    return reader


async def held(reader: IndexReader, worker_id: WorkerId = A) -> set[ChunkHash]:
    snapshot = await reader.snapshot(worker_id)
    assert snapshot is not None
    return {chunk for batch in snapshot.batches(3) for chunk in batch}


async def test_empty_index(reader: IndexReader) -> None:
    assert await reader.workers() == {}
    assert await reader.heartbeats([A]) == {}
    assert await reader.heartbeats([]) == {}
    assert await reader.snapshot(A) is None
    assert await reader.stream_position() == StreamPosition(0, 0)
    assert await reader.follow(StreamPosition(0, 0), 1) == []


async def test_registration_is_read_back(writer: IndexWriter, reader: IndexReader, make_info: MakeInfo) -> None:
    epoch = await writer.register(make_info("a"))
    workers = await reader.workers()
    assert workers[A].info == make_info("a")
    assert (workers[A].epoch, workers[A].seq) == (epoch, 0)
    assert epoch > 10**15


async def test_each_registration_has_a_higher_epoch_and_nothing_of_the_old_life(
    writer: IndexWriter, reader: IndexReader, make_info: MakeInfo, chain: Chain
) -> None:
    first = await writer.register(make_info("a"))
    await writer.publish(A, first, 1, [stored(*chain(3))])
    await writer.heartbeat(A, first, LOAD)
    second = await writer.register(make_info("a"))
    assert second > first
    snapshot = await reader.snapshot(A)
    assert snapshot is not None
    assert (snapshot.epoch, snapshot.seq, len(snapshot)) == (second, 0, 0)
    assert await reader.heartbeats([A]) == {}
    with pytest.raises(Fenced):
        await writer.publish(A, first, 2, [stored(*chain(4))])
    with pytest.raises(Fenced):
        await writer.heartbeat(A, first, LOAD)
    assert await writer.deregister(A, first) is False
    assert (await reader.workers())[A].epoch == second


async def test_published_events_are_in_the_snapshot_and_in_the_stream(
    writer: IndexWriter, reader: IndexReader, make_info: MakeInfo, chain: Chain
) -> None:
    chunks = chain(4)
    epoch = await writer.register(make_info("a"))
    batches = [
        [stored(*chunks)],
        [removed(chunks[3], chunks[2])],
        [CLEARED, stored(*chunks[:3]), removed(chunks[2])],
    ]
    for seq, batch in enumerate(batches, start=1):
        await writer.publish(A, epoch, seq, batch)
    assert await held(reader) == set(chunks[:2])
    entries = await reader.follow(StreamPosition(0, 0), 10)
    assert [entry.entry for entry in entries] == [
        IndexEntry(A, epoch, seq, tuple(batch)) for seq, batch in enumerate(batches, start=1)
    ]
    assert [entry.position for entry in entries] == sorted({entry.position for entry in entries})
    assert await reader.stream_position() == entries[-1].position
    assert await reader.follow(entries[1].position, 10) == entries[2:]
    assert (await reader.workers())[A].seq == 3


async def test_an_entry_of_the_largest_size_arrives_whole(
    writer: IndexWriter, reader: IndexReader, make_info: MakeInfo, chain: Chain
) -> None:
    chunks = chain(1024)
    epoch = await writer.register(make_info("a"))
    await writer.publish(A, epoch, 1, [stored(*chunks)])
    await writer.publish(A, epoch, 2, [removed(*chunks[24:])])
    assert await held(reader) == set(chunks[:24])


@pytest.mark.parametrize("seq", [0, 1, 3])
async def test_only_the_next_seq_is_taken_and_a_refusal_changes_nothing(
    writer: IndexWriter, reader: IndexReader, make_info: MakeInfo, chain: Chain, seq: int
) -> None:
    epoch = await writer.register(make_info("a"))
    await writer.publish(A, epoch, 1, [stored(*chain(2))])
    before = await reader.stream_position()
    with pytest.raises(Fenced):
        await writer.publish(A, epoch, seq, [CLEARED])
    assert await held(reader) == set(chain(2))
    assert await reader.stream_position() == before
    await writer.publish(A, epoch, 2, [CLEARED])
    assert await held(reader) == set()


async def test_without_a_registration_everything_is_gone(writer: IndexWriter, reader: IndexReader) -> None:
    with pytest.raises(RegistrationGone):
        await writer.publish(A, Epoch(1), 1, [CLEARED])
    with pytest.raises(RegistrationGone):
        await writer.heartbeat(A, Epoch(1), LOAD)
    assert await writer.deregister(A, Epoch(1)) is False
    assert await reader.heartbeats([A]) == {}


async def test_heartbeat_carries_the_load(writer: IndexWriter, reader: IndexReader, make_info: MakeInfo) -> None:
    epoch = await writer.register(make_info("a"))
    await writer.heartbeat(A, epoch, LOAD)
    assert await reader.heartbeats([WorkerId("b"), A]) == {A: Heartbeat(epoch=epoch, load=LOAD)}


async def test_deregister_removes_all(
    writer: IndexWriter, reader: IndexReader, make_info: MakeInfo, chain: Chain
) -> None:
    epoch = await writer.register(make_info("a"))
    await writer.publish(A, epoch, 1, [stored(*chain(2))])
    await writer.heartbeat(A, epoch, LOAD)
    assert await writer.deregister(A, epoch) is True
    assert await reader.workers() == {}
    assert await reader.heartbeats([A]) == {}
    assert await reader.snapshot(A) is None


async def test_workers_do_not_mix(writer: IndexWriter, reader: IndexReader, make_info: MakeInfo, chain: Chain) -> None:
    ids = [WorkerId("a"), WorkerId("a:b"), WorkerId("{a}")]
    epochs = [await writer.register(make_info(worker_id)) for worker_id in ids]
    assert len(set(epochs)) == 3
    for size, (worker_id, epoch) in enumerate(zip(ids, epochs, strict=True), start=1):
        await writer.publish(worker_id, epoch, 1, [stored(*chain(size))])
    assert [len(await held(reader, worker_id)) for worker_id in ids] == [1, 2, 3]


async def test_following_waits_for_the_first_entry(
    writer: IndexWriter, reader: IndexReader, make_info: MakeInfo, chain: Chain
) -> None:
    epoch = await writer.register(make_info("a"))

    async def first_entry() -> IndexEntry | None:
        while not (entries := await reader.follow(StreamPosition(0, 0), 300)):
            pass
        return entries[0].entry

    following = asyncio.create_task(first_entry())
    await asyncio.sleep(0.02)
    assert not following.done()
    await writer.publish(A, epoch, 1, [stored(*chain(1))])
    entry = await asyncio.wait_for(following, 2)
    assert entry is not None
    assert entry.seq == 1
