"""SnapshotRepair: makes the index hold what a worker holds, in the background, while other workers' events go on.

    read pages (entries of this life are held) -> clear -> store in slices -> apply the held entries -> come in

Owns: one task for each life that is out of step, how many read at a time, and loading a snapshot in slices.
Does not: decide which life needs it, or how often to try again after Redis failed (cluster.index.follower).
Invariants: at most one task per life; a life that is no longer the current one is not touched; no slice has more than
`RECORDS_PER_SLICE` records.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.replica import WorkerId
from cluster.index.background import end_task
from cluster.index.base import ChunkIndex, IndexReader, IndexUnavailable, Snapshot
from cluster.index.followed_life import FollowedLife
from cluster.index.known import FollowerCounters

logger = logging.getLogger(__name__)

RECORDS_PER_SLICE = 512  # applied or freed between two turns of the event loop
READS_AT_A_TIME = 4
_CLEARED = (CacheEvent(CacheEventKind.CLEARED),)


class SnapshotRepair:
    """`is_current` tells whether a life is still followed; `changed` hears of every life that came in or was tried."""

    def __init__(
        self,
        reader: IndexReader,
        index: ChunkIndex,
        counters: FollowerCounters,
        is_current: Callable[[WorkerId, FollowedLife], bool],
        changed: Callable[[WorkerId], None],
    ) -> None:
        self._reader = reader
        self._index = index
        self._counters = counters
        self._is_current = is_current
        self._changed = changed
        self._slots = asyncio.Semaphore(READS_AT_A_TIME)
        self._tasks: dict[FollowedLife, asyncio.Task[None]] = {}

    def start(self, worker_id: WorkerId, life: FollowedLife) -> None:
        """Begin, unless this life is being read already."""
        if life not in self._tasks:
            task = asyncio.create_task(self._repair(worker_id, life), name=f"index-snapshot-{worker_id}")
            self._tasks[life] = task
            task.add_done_callback(lambda _: self._tasks.pop(life, None))

    async def close(self) -> None:
        for task in list(self._tasks.values()):
            await end_task(task)

    async def _repair(self, worker_id: WorkerId, life: FollowedLife) -> None:
        try:
            async with self._slots:
                while self._is_current(worker_id, life) and not await self._attempt(worker_id, life):
                    self._counters.overflows += life.overflowed
        except IndexUnavailable as error:
            logger.debug("the snapshot of %s could not be read: %s", worker_id, error)
        except Exception:
            logger.exception("reading the snapshot of %s failed", worker_id)
        finally:
            if life.seq is None:
                life.stop_reading()
            self._changed(worker_id)

    async def _attempt(self, worker_id: WorkerId, life: FollowedLife) -> bool:
        """One read. False when it has to be done again at once."""
        life.begin_reading()
        snapshot = await self._reader.snapshot(worker_id)
        if not self._is_current(worker_id, life):
            return True
        if snapshot is None or snapshot.epoch != life.epoch:
            life.tried = True  # polls will tell of its new life, or ask again
            return True
        seq = await self._load(worker_id, life, snapshot)
        if seq is None:
            return True
        came_in = life.come_in(seq, snapshot.settled)
        life.tried = life.tried or came_in
        return came_in

    async def _load(self, worker_id: WorkerId, life: FollowedLife, snapshot: Snapshot) -> int | None:
        """The seq up to which the index is complete now; None when the life ended meanwhile."""
        self._index.apply(worker_id, life.epoch, _CLEARED)
        for hashes in snapshot.batches(RECORDS_PER_SLICE):
            self._index.apply(worker_id, life.epoch, (CacheEvent(CacheEventKind.STORED, hashes),))
            await asyncio.sleep(0)
            if not self._is_current(worker_id, life):
                return None
        seq, unyielded = snapshot.seq, 0
        while (entry := life.next_held(seq)) is not None:
            self._index.apply(worker_id, life.epoch, entry.events)
            self._counters.applied += 1
            seq = entry.seq
            unyielded += entry.records
            if unyielded >= RECORDS_PER_SLICE:
                unyielded = 0
                await asyncio.sleep(0)
                if not self._is_current(worker_id, life):
                    return None
        return seq
