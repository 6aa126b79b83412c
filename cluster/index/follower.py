"""IndexFollower: keeps a router's in-process index equal to what the workers publish.

One task does everything in turn: poll registrations and heartbeats, read the stream up to the next poll, and
re-read a worker's snapshot where one is needed. While it reads a snapshot the stream itself holds back the newer
entries; those that the snapshot already contains are then skipped by their seq.

Owns: the index's feed, the table of known workers with their loads, and the reconnecting.
Does not: score, or talk to Redis but through its reader.
Invariants: entries of a life are applied in seq order without a hole, or its snapshot is read again; a life that was
dropped for death never returns; while Redis is away index and workers stay as they were.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.config import IndexConfig
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.replica import Epoch, ReplicaLoad, WorkerId
from cluster.index.background import end_task
from cluster.index.base import (
    ChunkIndex,
    Heartbeat,
    IndexEntry,
    IndexReader,
    IndexUnavailable,
    Registration,
    StreamPosition,
)
from cluster.index.known import FollowerCounters, FollowerState, KnownWorker

__all__ = ["FollowerCounters", "FollowerState", "IndexFollower", "KnownWorker"]

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 1.0
_RECORDS_PER_SLICE = 1024  # applied or freed between two turns of the event loop
_CLEARED = (CacheEvent(CacheEventKind.CLEARED),)


@dataclass(slots=True, eq=False)
class _Life:
    """Progress in one life. `seq` None: a snapshot is needed. `promised`: its seq as of the last poll."""

    epoch: Epoch
    seq: int | None = None
    promised: int = 0


class IndexFollower:
    """Feeds `index` from `reader`. `workers`, `state`, `ready` and `counters` are for reading."""

    def __init__(
        self,
        reader: IndexReader,
        index: ChunkIndex,
        config: IndexConfig,
        route_digest: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader = reader
        self._index = index
        self._heartbeat_s = config.heartbeat_s
        self._grace_s = config.heartbeat_ttl_s
        self._route_digest = route_digest
        self._clock = clock
        self.state = FollowerState.COLD
        self.workers: dict[WorkerId, KnownWorker] = {}
        self.counters = FollowerCounters()
        self._lives: dict[WorkerId, _Life] = {}
        self._dead: dict[WorkerId, Epoch | None] = {}  # None: its epoch was not known when it died
        self._position = StreamPosition(0, 0)
        self._next_poll = 0.0
        self._absence_counts_from = 0.0
        self._caught_up = False
        self._snapshot_in = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Every worker's snapshot has been read once; stays true when Redis goes away later."""
        return self._snapshot_in.is_set()

    async def start(self) -> None:
        """Begin to follow in the background."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="index-follower")

    async def wait_ready(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self._snapshot_in.wait()
        except TimeoutError:
            return False
        return True

    def drop(self, worker_id: WorkerId) -> None:
        """The worker's process died: forget it now, and refuse what its last life left behind in Redis."""
        known = self.workers.get(worker_id)
        self._dead[worker_id] = self._dead.get(worker_id) if known is None else known.epoch
        self._forget(worker_id)

    async def close(self) -> None:
        """Stop following. The index and the reader stay as they are; the reader belongs to who made it."""
        task, self._task = self._task, None
        if task is not None:
            await end_task(task)

    async def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                await self._connect()
                backoff_s = _FIRST_BACKOFF_S
                while True:
                    await self._turn()
            except IndexUnavailable as error:
                if self.state is not FollowerState.UNREACHABLE:
                    logger.warning("index unreachable, routing on what is known: %s", error)
            except Exception:
                logger.exception("the index follower failed; it starts again from the snapshots")
            self.state = FollowerState.UNREACHABLE
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    async def _connect(self) -> None:
        """Stream position first, then snapshots: what is published in between is in both, and skipped once."""
        self._position = await self._reader.stream_position()
        for life in self._lives.values():
            life.seq = None
        # After an outage workers need a moment to beat again (and to register again, if Redis came back empty).
        self._absence_counts_from = self._clock() + (self._grace_s if self.ready else 0.0)
        await self._poll()
        if self.state is not FollowerState.FOLLOWING:
            logger.info("following the index: %d workers", len(self.workers))
        self.state = FollowerState.FOLLOWING
        self._snapshot_in.set()

    async def _turn(self) -> None:
        now = self._clock()
        if now >= self._next_poll:
            await self._check_stream_end()
            await self._poll()
        block_ms = max(1, int(1000 * (self._next_poll - self._clock())))
        entries = await self._reader.follow(self._position, block_ms)
        self._caught_up = self._caught_up or not entries
        self.counters.bad = self._reader.bad_payloads
        unyielded = 0
        for position, entry in entries:
            if entry is not None:
                await self._handle(entry)
                unyielded += 1 + sum(len(event.chunk_hashes) for event in entry.events)
            self._position = position
            if unyielded >= _RECORDS_PER_SLICE:
                unyielded = 0
                await asyncio.sleep(0)

    async def _check_stream_end(self) -> None:
        """A stream that ends before our place lost entries (failover, flush): go there, and read all again."""
        end = await self._reader.stream_position()
        if end < self._position:
            self._position = end
            for life in self._lives.values():
                life.seq = None

    async def _poll(self) -> None:
        self._next_poll = self._clock() + self._heartbeat_s
        registrations = await self._reader.workers()
        beats = await self._reader.heartbeats(registrations.keys())
        self._dead = {worker_id: epoch for worker_id, epoch in self._dead.items() if worker_id in registrations}
        for worker_id, registration in registrations.items():
            beat = beats.get(worker_id)
            # Another epoch in the beat: it registered between the two reads. The next poll sees both.
            if beat is not None and beat.epoch == registration.epoch and not self._is_dead(worker_id, beat.epoch):
                await self._see(worker_id, registration, beat)
        if self._clock() >= self._absence_counts_from:
            for worker_id in [worker_id for worker_id in self.workers if worker_id not in beats]:
                logger.info("worker %s has no heartbeat any more: dropped from the index", worker_id)
                self._forget(worker_id)
        self._caught_up = False
        self.counters.bad = self._reader.bad_payloads
        while self._index.sweep(_RECORDS_PER_SLICE):
            await asyncio.sleep(0)

    def _is_dead(self, worker_id: WorkerId, epoch: Epoch) -> bool:
        if worker_id not in self._dead:
            return False
        died_in = self._dead[worker_id]
        if died_in is None:
            died_in = self._dead[worker_id] = epoch
        return epoch <= died_in

    async def _see(self, worker_id: WorkerId, registration: Registration, beat: Heartbeat) -> None:
        """A worker is alive: take it in, or take its load; read its snapshot if it is new or entries went missing."""
        known = self.workers.get(worker_id)
        now = self._clock()
        if known is None or known.epoch != registration.epoch:
            self._adopt(worker_id, registration, beat.load, now)
        else:
            self.workers[worker_id] = replace(known, load=beat.load, loaded_at=now)
        life = self._lives.get(worker_id)
        if life is None:
            return
        # Everything up to `promised` had been in the stream at the last poll, and the stream was read to its end
        # since: what is missing now will not come any more.
        lost = life.seq is not None and self._caught_up and life.seq < life.promised
        life.promised = registration.seq
        if lost:
            self.counters.repaired += 1
        if lost or life.seq is None:
            await self._read_snapshot(worker_id, life)

    def _adopt(self, worker_id: WorkerId, registration: Registration, load: ReplicaLoad, now: float) -> None:
        indexed = registration.info.route_digest == self._route_digest
        self._lives.pop(worker_id, None)
        if indexed:
            self._index.add_worker(worker_id, registration.epoch)
            self._lives[worker_id] = _Life(registration.epoch)
        else:
            self._index.drop_worker(worker_id)
            self.counters.scheme_mismatches += 1
            logger.warning("worker %s hashes prompts by another route scheme: routed to by load only", worker_id)
        self.workers[worker_id] = KnownWorker(
            info=registration.info, epoch=registration.epoch, load=load, loaded_at=now, indexed=indexed
        )

    async def _handle(self, entry: IndexEntry) -> None:
        life = self._lives.get(entry.worker_id)
        if life is None or entry.epoch < life.epoch or (life.seq is not None and entry.seq <= life.seq):
            self.counters.skipped += 1
        elif entry.epoch > life.epoch:
            # It started again in place. What it held is gone; the poll, now due, takes the new life in.
            self._lives.pop(entry.worker_id)
            self._index.drop_worker(entry.worker_id)
            self._next_poll = 0.0
            self.counters.skipped += 1
        elif life.seq is not None and entry.seq == life.seq + 1:
            self._index.apply(entry.worker_id, entry.epoch, entry.events)
            life.seq = entry.seq
            self.counters.applied += 1
        else:
            self.counters.repaired += 1
            await self._read_snapshot(entry.worker_id, life)

    async def _read_snapshot(self, worker_id: WorkerId, life: _Life) -> None:
        """Make the index hold what the worker holds. If it has no such life any more, later polls will tell."""
        life.seq = None
        snapshot = await self._reader.snapshot(worker_id)
        if snapshot is None or snapshot.epoch != life.epoch or self._lives.get(worker_id) is not life:
            return
        self._index.apply(worker_id, life.epoch, _CLEARED)
        for hashes in snapshot.batches(_RECORDS_PER_SLICE):
            self._index.apply(worker_id, life.epoch, (CacheEvent(CacheEventKind.STORED, hashes),))
            await asyncio.sleep(0)
            if self._lives.get(worker_id) is not life:
                return  # dropped meanwhile
        life.seq = snapshot.seq

    def _forget(self, worker_id: WorkerId) -> None:
        self.workers.pop(worker_id, None)
        self._lives.pop(worker_id, None)
        self._index.drop_worker(worker_id)
