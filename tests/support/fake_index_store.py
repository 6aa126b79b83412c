"""FakeStore: the shared index in memory, with the semantics of the Redis scripts and switches for what can go wrong.

Owns: FakeStore (IndexWriter and IndexReader in one), its clock's part in epochs, stream ids and expiry.
Does not: test anything; test_index_conformance.py holds FakeStore and Redis to the same contract.
Invariants: a refused call changes nothing.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, ReplicaInfo, ReplicaLoad, WorkerId
from cluster.index.base import (
    NO_EPOCH,
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


@dataclass
class _Record:
    epoch: Epoch
    info: ReplicaInfo
    seq: int = 0
    chunks: dict[ChunkHash, None] = field(default_factory=dict)


@dataclass(frozen=True)
class StoreState:
    """What a replica that lags holds."""

    records: dict[WorkerId, _Record]
    beats: dict[WorkerId, Heartbeat]
    expiry: dict[WorkerId, float]
    stream: list[StreamEntry]
    last_epoch: int


class FakeStore:
    """`down` makes every call fail, `lose_answers` makes as many publishes fail after they took effect; `stream` and
    `beats` may be tampered with. `page` cuts snapshots in pages, each of which takes `page_s`;
    `look_again_s` is how often `follow` looks for entries."""

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        ttl_s: float | None = None,
        page: int = 0,
        page_s: float = 0.0,
        look_again_s: float = 0.005,
    ) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._page = page
        self._page_s = page_s
        self._look_again_s = look_again_s
        self.records: dict[WorkerId, _Record] = {}
        self.beats: dict[WorkerId, Heartbeat] = {}
        self.expiry: dict[WorkerId, float] = {}
        self.stream: list[StreamEntry] = []
        self.down = False
        self.lose_answers = 0
        self.bad_payloads = 0
        self.last_epoch = 0
        self.snapshots_read = 0
        self.during_snapshot: Callable[[], Awaitable[None]] | None = None

    async def register(self, info: ReplicaInfo, after: Epoch = NO_EPOCH) -> Epoch:
        self._check()
        self.last_epoch = max(self.last_epoch + 1, after + 1, int(self._clock() * 1e6))
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
        if self.lose_answers:
            self.lose_answers -= 1
            raise IndexUnavailable("the answer was lost")

    async def heartbeat(self, worker_id: WorkerId, epoch: Epoch, load: ReplicaLoad, seq: int = 0) -> None:
        if self._record(worker_id, epoch).seq < seq:
            raise Fenced("it acknowledged more than it has")
        self.beats[worker_id] = Heartbeat(epoch=epoch, load=load)
        if self._ttl_s is not None:
            self.expiry[worker_id] = self._clock() + self._ttl_s

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
        now = self._clock()
        alive = [w for w in worker_ids if w in self.beats and self.expiry.get(w, now) >= now]
        return {worker_id: self.beats[worker_id] for worker_id in alive}

    async def snapshot(self, worker_id: WorkerId) -> Snapshot | None:
        self._check()
        self.snapshots_read += 1
        record = self.records.get(worker_id)
        if record is None:
            return None
        seq = record.seq
        pages = [b"".join(record.chunks)]
        if self._page:
            pages = await self._scan(worker_id, record)
            if self.records.get(worker_id) is not record:
                return None
        snapshot = Snapshot(epoch=record.epoch, seq=seq, settled=record.seq, pages=tuple(pages))
        if self.during_snapshot is not None:
            await self.during_snapshot()
        return snapshot

    async def stream_position(self) -> StreamPosition:
        self._check()
        return self.stream[-1].position if self.stream else StreamPosition(0, 0)

    async def server_time_s(self) -> float:
        self._check()
        return self._clock()

    async def follow(self, position: StreamPosition, block_ms: int) -> list[StreamEntry]:
        self._check()
        newer = [entry for entry in self.stream if entry.position > position][:64]
        if not newer:
            await asyncio.sleep(min(block_ms / 1000, self._look_again_s))
        self.bad_payloads += sum(entry.entry is None for entry in newer)
        return newer

    async def close(self) -> None:
        return

    def push(self, entry: IndexEntry | None) -> None:
        """Put an entry at the end of the stream only; None stands for bytes that cannot be parsed."""
        now = StreamPosition(int(self._clock() * 1000), 0)
        last = self.stream[-1].position if self.stream else StreamPosition(0, 0)
        self.stream.append(StreamEntry(max(now, StreamPosition(last.ms, last.seq + 1)), entry))

    def save(self) -> StoreState:
        """A copy, as a replica has it. `load` makes it the truth again, however much happened since."""
        state = (self.records, self.beats, self.expiry, self.stream, self.last_epoch)
        return StoreState(*copy.deepcopy(state))

    def load(self, state: StoreState | None = None) -> None:
        """Go on from that state; without one, from nothing."""
        state = copy.deepcopy(state) if state else StoreState({}, {}, {}, [], 0)
        self.records, self.beats, self.expiry = state.records, state.beats, state.expiry
        self.stream, self.last_epoch = state.stream, state.last_epoch

    async def _scan(self, worker_id: WorkerId, record: _Record) -> list[bytes]:
        """As SSCAN does it: what is there all the time comes, what comes and goes meanwhile may come or not."""
        pages = []
        for low in range(0, 256, self._page):
            self._check()
            page = [chunk for chunk in record.chunks if low <= chunk[0] < low + self._page]
            pages.append(b"".join(page))
            await asyncio.sleep(self._page_s)
        return pages

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
