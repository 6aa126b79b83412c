"""IndexFollower: keeps a router's in-process index equal to what the workers publish.

One task polls registrations and heartbeats and reads the stream up to the next poll. A worker that is new, or of whose
entries one went missing, is read from its snapshot by cluster.index.snapshot_repair meanwhile.

A missing entry shows in two ways: the next one's seq, or, if there is none, a poll: the worker has published further
than the index contains although the stream has been read to the place where it ended after that.

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
from dataclasses import replace

from cluster.config import IndexConfig
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
from cluster.index.followed_life import FollowedLife, Taken
from cluster.index.known import FollowerCounters, FollowerState, KnownWorker
from cluster.index.snapshot_repair import RECORDS_PER_SLICE, SnapshotRepair

__all__ = ["FollowerCounters", "FollowerState", "IndexFollower", "KnownWorker"]

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 1.0


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
        self._config = config
        self._route_digest = route_digest
        self._clock = clock
        self.workers: dict[WorkerId, KnownWorker] = {}
        self.counters = FollowerCounters()
        self._lives: dict[WorkerId, FollowedLife] = {}
        self._dead: dict[WorkerId, Epoch | None] = {}  # None: the first life that shows up is the dead one
        self._repair = SnapshotRepair(reader, index, self.counters, self._is_current, self._life_changed)
        self._reachable: bool | None = None  # None: not asked yet
        self._position: StreamPosition | None = None
        self._due_at: StreamPosition | None = None  # the stream's end when the lives' `due` had been published
        self._server_ahead_s = 0.0  # the server's clock minus ours
        self._next_poll = 0.0
        self._absence_counts_from = 0.0
        self._polled = False
        self._snapshot_in = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Every worker known at the start has been read; stays true when Redis goes away later."""
        return self._snapshot_in.is_set()

    @property
    def state(self) -> FollowerState:
        """See cluster.index.known."""
        if self._reachable is False:
            return FollowerState.UNREACHABLE
        if not self.ready:
            return FollowerState.COLD
        now, bound = self._clock(), self._config.stale_after_s
        late = self.counters.lag_s > bound or any(life.late_for(now) > bound for life in self._lives.values())
        return FollowerState.STALE if late else FollowerState.FOLLOWING

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
        if known is not None:
            self._dead[worker_id] = known.epoch
        elif worker_id not in self._dead:
            # A life that began before now, by the server's clock: that is what epochs are made of.
            now_us = int((self._clock() + self._server_ahead_s) * 1e6)
            self._dead[worker_id] = Epoch(now_us) if self._polled else None
        self._forget(worker_id)

    async def close(self) -> None:
        """Stop following. The index and the reader stay as they are; the reader belongs to who made it."""
        tasks = [self._task, self._sweeper]
        self._task = self._sweeper = None
        for task in tasks:
            if task is not None:
                await end_task(task)
        await self._repair.close()

    async def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                await self._connect()
                backoff_s = _FIRST_BACKOFF_S
                while True:
                    await self._turn()
            except IndexUnavailable as error:
                if self._reachable is not False:
                    logger.warning("index unreachable, routing on what is known: %s", error)
            except Exception:
                logger.exception("the index follower failed; it starts again from the snapshots")
                self._fall_out_of_all()
            self._reachable = False
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    async def _connect(self) -> None:
        """The stream's end first, then snapshots: what is published in between is in both, and taken once. After an
        outage the stream is read on from the old place; what is gone from it will show as missing."""
        if self._position is None:
            self._position = await self._reader.stream_position()
        if self._polled:
            self._let_workers_return()
        await self._poll()
        if not self._reachable:
            logger.info("following the index: %d workers", len(self.workers))
        self._reachable = True

    async def _turn(self) -> None:
        assert self._position is not None
        if self._clock() >= self._next_poll:
            await self._poll()
        block_ms = max(1, int(1000 * (self._next_poll - self._clock())))
        entries = await self._reader.follow(self._position, block_ms)
        self.counters.bad = self._reader.bad_payloads
        unyielded = 0
        for position, entry in entries:
            if entry is not None:
                self._handle(entry)
                unyielded += entry.records
            self._position = position
            self._note_lag(position)
            if unyielded >= RECORDS_PER_SLICE:
                unyielded = 0
                await asyncio.sleep(0)
        if not entries and (self._due_at is None or self._position >= self._due_at):
            self.counters.lag_s = 0.0
        self._look_for_lost_entries()

    async def _poll(self) -> None:
        self._next_poll = self._clock() + self._config.heartbeat_s
        registrations = await self._reader.workers()
        beats = await self._reader.heartbeats(registrations.keys())
        self._dead = {worker_id: epoch for worker_id, epoch in self._dead.items() if worker_id in registrations}
        for worker_id, registration in registrations.items():
            beat, known = beats.get(worker_id), self.workers.get(worker_id)
            if known is not None and _registered_again(known, registration):
                self._let_workers_return()
            # Another epoch in the beat: it registered between the two reads. The next poll sees both.
            if beat is not None and beat.epoch == registration.epoch and not self._is_dead(worker_id, beat.epoch):
                self._see(worker_id, registration, beat)
        await self._read_clock_and_end()
        if self._clock() >= self._absence_counts_from:
            for worker_id in [worker_id for worker_id in self.workers if worker_id not in beats]:
                logger.info("worker %s has no heartbeat any more: dropped from the index", worker_id)
                self._forget(worker_id)
        self.counters.bad = self._reader.bad_payloads
        self._polled = True
        self._note_ready()
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.create_task(self._sweep(), name="index-sweeper")

    async def _read_clock_and_end(self) -> None:
        asked = self._clock()
        server_s = await self._reader.server_time_s()
        self._server_ahead_s = server_s - (asked + self._clock()) / 2
        end = await self._reader.stream_position()
        if self._position is None or end < self._position:
            self._position, self._due_at = end, None  # a flush, or a failover to one that lagged: entries are gone
            self._let_workers_return()
        if self._due_at is None:
            self._due_at = end
            for life in self._lives.values():
                life.due = life.promised

    def _let_workers_return(self) -> None:
        """After an outage or a flush they need a moment to beat again, or to register again. A flush shows in a stream
        that ends earlier than before or, once there are new entries, in a process that has registered again."""
        self._absence_counts_from = self._clock() + self._config.heartbeat_ttl_s

    async def _sweep(self) -> None:
        while self._index.sweep(RECORDS_PER_SLICE):
            await asyncio.sleep(0)

    def _is_dead(self, worker_id: WorkerId, epoch: Epoch) -> bool:
        if worker_id not in self._dead:
            return False
        died_in = self._dead[worker_id]
        if died_in is None:
            died_in = self._dead[worker_id] = epoch
        return epoch <= died_in

    def _see(self, worker_id: WorkerId, registration: Registration, beat: Heartbeat) -> None:
        """A worker is alive: take it in, or take its load; have its snapshot read if it is out of step."""
        now = self._clock()
        known = self.workers.get(worker_id)
        if known is not None and registration.epoch < known.epoch:
            return  # Redis went back to a life that is over
        life = self._lives.get(worker_id)
        if known is None or known.epoch != registration.epoch or (known.indexed and life is None):
            self._adopt(worker_id, registration, beat.load, now)
        else:
            self.workers[worker_id] = replace(known, load=beat.load, loaded_at=now)
        life = self._lives.get(worker_id)
        if life is None:
            return
        life.promised = registration.seq
        if life.seq is None:
            self._repair.start(worker_id, life)
        life.note_time(now)
        self._note_step(worker_id)

    def _adopt(self, worker_id: WorkerId, registration: Registration, load: ReplicaLoad, now: float) -> None:
        indexed = registration.info.route_digest == self._route_digest
        self._lives.pop(worker_id, None)
        if indexed:
            self._index.add_worker(worker_id, registration.epoch)
            self._lives[worker_id] = FollowedLife(registration.epoch)
        else:
            self._index.drop_worker(worker_id)
            self.counters.scheme_mismatches += 1
            logger.warning("worker %s hashes prompts by another route scheme: routed to by load only", worker_id)
        self.workers[worker_id] = KnownWorker(
            info=registration.info, epoch=registration.epoch, load=load, loaded_at=now, indexed=indexed, in_step=False
        )

    def _handle(self, entry: IndexEntry) -> None:
        worker_id = entry.worker_id
        life = self._lives.get(worker_id)
        if life is None or entry.epoch < life.epoch:
            self.counters.skipped += 1
            return
        if entry.epoch > life.epoch:
            # It started again in place. What it held is gone; the poll, now due, takes the new life in.
            del self._lives[worker_id]
            self._index.drop_worker(worker_id)
            self._next_poll = 0.0
            self.counters.skipped += 1
            self._note_step(worker_id)
            return
        taken = life.take(entry)
        if taken is Taken.APPLY:
            self._index.apply(worker_id, entry.epoch, entry.events)
            self.counters.applied += 1
            if entry.seq == life.settled:
                self._note_step(worker_id)
        elif taken is Taken.GAP:
            self._read_again(worker_id, life)
        elif taken is Taken.SKIP:
            self.counters.skipped += 1

    def _look_for_lost_entries(self) -> None:
        """Once the stream has been read to where it ended after a poll, what was published then must be here."""
        if self._due_at is None or self._position is None or self._position < self._due_at:
            return
        self._due_at = None
        for worker_id, life in self._lives.items():
            if life.seq is not None and life.seq < life.due:
                self._read_again(worker_id, life)

    def _read_again(self, worker_id: WorkerId, life: FollowedLife) -> None:
        self.counters.repaired += 1
        life.fall_out()
        life.note_time(self._clock())
        self._repair.start(worker_id, life)
        self._note_step(worker_id)

    def _fall_out_of_all(self) -> None:
        for worker_id, life in self._lives.items():
            life.fall_out()
            self._note_step(worker_id)

    def _is_current(self, worker_id: WorkerId, life: FollowedLife) -> bool:
        return self._lives.get(worker_id) is life

    def _life_changed(self, worker_id: WorkerId) -> None:
        life = self._lives.get(worker_id)
        if life is not None:
            life.note_time(self._clock())
        self._note_step(worker_id)
        self._note_ready()

    def _note_step(self, worker_id: WorkerId) -> None:
        """Keep the known worker's `in_step` true."""
        known, life = self.workers.get(worker_id), self._lives.get(worker_id)
        bound = self._config.stale_after_s
        late = life is None or max(life.late_for(self._clock()), self.counters.lag_s) > bound
        in_step = life is not None and life.in_step and not late
        if known is not None and known.in_step != in_step:
            self.workers[worker_id] = replace(known, in_step=in_step)

    def _note_ready(self) -> None:
        if self._polled and not self.ready and all(life.tried for life in self._lives.values()):
            self._snapshot_in.set()

    def _note_lag(self, position: StreamPosition) -> None:
        self.counters.lag_s = max(0.0, self._clock() + self._server_ahead_s - position.ms / 1000)

    def _forget(self, worker_id: WorkerId) -> None:
        self.workers.pop(worker_id, None)
        self._lives.pop(worker_id, None)
        self._index.drop_worker(worker_id)
        self._note_ready()


def _registered_again(known: KnownWorker, registration: Registration) -> bool:
    """The same process: the index had lost it."""
    incarnation = registration.info.incarnation
    return registration.epoch > known.epoch and incarnation != "" and incarnation == known.info.incarnation
