"""Fixtures of the index tests: values, an in-memory stand-in for the shared index, and a private Redis server.

Owns: FakeStore (IndexWriter and IndexReader in one, with switches for what can go wrong).
Does not: test anything; test_index_conformance.py holds FakeStore and Redis to the same contract.
Invariants: every test has its own keys; the server ends with the session.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from cluster.config import IndexConfig
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash, RouteScheme, hash_prompt, root_hash
from cluster.core.replica import Epoch, ReplicaInfo, ReplicaLoad, WorkerId
from cluster.index.base import (
    Fenced,
    Heartbeat,
    IndexEntry,
    IndexUnavailable,
    Registration,
    RegistrationGone,
    Snapshot,
    StreamEntry,
    StreamPosition,
)
from cluster.index.private_server import PrivateRedis
from cluster.index.redis_reader import RedisReader
from cluster.index.redis_writer import RedisWriter

DIGEST = "the-route-digest"


@dataclass
class _Record:
    epoch: Epoch
    info: ReplicaInfo
    seq: int = 0
    chunks: dict[ChunkHash, None] = field(default_factory=dict)


class FakeStore:
    """The shared index in memory. `down` makes every call fail; `stream` and `beats` may be tampered with."""

    def __init__(self) -> None:
        self.records: dict[WorkerId, _Record] = {}
        self.beats: dict[WorkerId, Heartbeat] = {}
        self.stream: list[StreamEntry] = []
        self.down = False
        self.bad_payloads = 0
        self.last_epoch = 0
        self.snapshots_read = 0
        self.during_snapshot: Callable[[], Awaitable[None]] | None = None

    async def register(self, info: ReplicaInfo) -> Epoch:
        self._check()
        self.last_epoch = max(self.last_epoch + 1, time.time_ns() // 1000)
        self.records[info.worker_id] = _Record(Epoch(self.last_epoch), info)
        self.beats.pop(info.worker_id, None)
        return Epoch(self.last_epoch)

    async def publish(self, worker_id: WorkerId, epoch: Epoch, seq: int, events: Sequence[CacheEvent]) -> None:
        record = self._record(worker_id, epoch)
        if seq != record.seq + 1:
            raise Fenced("seq")
        for event in events:
            if event.kind is CacheEventKind.STORED:
                record.chunks.update(dict.fromkeys(event.chunk_hashes))
            elif event.kind is CacheEventKind.REMOVED:
                for chunk in event.chunk_hashes:
                    record.chunks.pop(chunk, None)
            else:
                record.chunks.clear()
        record.seq = seq
        self.push(IndexEntry(worker_id, epoch, seq, tuple(events)))

    async def heartbeat(self, worker_id: WorkerId, epoch: Epoch, load: ReplicaLoad) -> None:
        self._record(worker_id, epoch)
        self.beats[worker_id] = Heartbeat(epoch=epoch, load=load)

    async def deregister(self, worker_id: WorkerId, epoch: Epoch) -> bool:
        self._check()
        record = self.records.get(worker_id)
        if record is None or record.epoch != epoch:
            return False
        del self.records[worker_id]
        self.beats.pop(worker_id, None)
        return True

    async def workers(self) -> dict[WorkerId, Registration]:
        self._check()
        return {w: Registration(epoch=r.epoch, seq=r.seq, info=r.info) for w, r in self.records.items()}

    async def heartbeats(self, worker_ids: Collection[WorkerId]) -> dict[WorkerId, Heartbeat]:
        self._check()
        return {worker_id: self.beats[worker_id] for worker_id in worker_ids if worker_id in self.beats}

    async def snapshot(self, worker_id: WorkerId) -> Snapshot | None:
        self._check()
        self.snapshots_read += 1
        record = self.records.get(worker_id)
        if record is None:
            return None
        snapshot = Snapshot(epoch=record.epoch, seq=record.seq, packed=b"".join(record.chunks))
        if self.during_snapshot is not None:
            await self.during_snapshot()
        return snapshot

    async def stream_position(self) -> StreamPosition:
        self._check()
        return self.stream[-1].position if self.stream else StreamPosition(0, 0)

    async def follow(self, position: StreamPosition, block_ms: int) -> list[StreamEntry]:
        self._check()
        newer = [entry for entry in self.stream if entry.position > position][:64]
        if not newer:
            await asyncio.sleep(min(block_ms, 5) / 1000)
        self.bad_payloads += sum(entry.entry is None for entry in newer)
        return newer

    async def close(self) -> None:
        return

    def push(self, entry: IndexEntry | None) -> None:
        """Put an entry at the end of the stream only; None stands for bytes that cannot be parsed."""
        last = self.stream[-1].position.seq if self.stream else 0
        self.stream.append(StreamEntry(StreamPosition(1, last + 1), entry))

    def _check(self) -> None:
        if self.down:
            raise IndexUnavailable("switched off by the test")

    def _record(self, worker_id: WorkerId, epoch: Epoch) -> _Record:
        self._check()
        record = self.records.get(worker_id)
        if record is None:
            raise RegistrationGone("no record")
        if record.epoch != epoch:
            raise Fenced("epoch")
        return record


@pytest.fixture
def fake_store() -> FakeStore:
    return FakeStore()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[PrivateRedis]:
    with PrivateRedis() as server:
        yield server


@pytest.fixture
def index_config() -> IndexConfig:
    return IndexConfig(
        key_prefix=f"test-{uuid.uuid4().hex}",
        heartbeat_s=0.05,
        heartbeat_ttl_s=0.4,
        publish_interval_s=0.01,
        timeout_s=1.0,
    )


@pytest.fixture
async def redis_writer(redis_server: PrivateRedis, index_config: IndexConfig) -> AsyncIterator[RedisWriter]:
    writer = RedisWriter.open(index_config, redis_server.url, "org/model {1}")
    yield writer
    await writer.close()


@pytest.fixture
async def redis_reader(redis_server: PrivateRedis, index_config: IndexConfig) -> AsyncIterator[RedisReader]:
    reader = RedisReader.open(index_config, redis_server.url, "org/model {1}")
    yield reader
    await reader.close()


@pytest.fixture
def make_info() -> Callable[..., ReplicaInfo]:
    def make(worker_id: str, route_digest: str = DIGEST) -> ReplicaInfo:
        return ReplicaInfo(
            worker_id=WorkerId(worker_id),
            route_digest=route_digest,
            kv_fingerprint="fp",
            block_size=16,
            chunk_tokens=64,
            num_blocks=1024,
            max_model_len=4096,
            model="org/model {1}",
        )

    return make


@pytest.fixture
def chain() -> Callable[..., list[ChunkHash]]:
    """`chain(5)`: the hashes of a prompt of 5 chunks; another `salt` gives unrelated ones."""

    def make(num_chunks: int, salt: str = "") -> list[ChunkHash]:
        scheme = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=1, salt=salt)
        return hash_prompt(root_hash(scheme), range(num_chunks), 1)

    return make


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    async def wait(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "what was waited for did not happen"
            await asyncio.sleep(0.005)

    return wait
