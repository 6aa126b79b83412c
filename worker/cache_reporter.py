"""CacheReporter: tells the shared index what this replica's cache gained and lost, and that the replica lives.

    record() -> EventBacklog: mirror (what is held)       -> on a new life: published as a whole, seq from 1
                              pending (not yet published) -> batches -> writer.publish(epoch, seq)

When the index has lost us, or answers went missing, nothing is patched up: the reporter begins a new life (a new
epoch) and publishes its mirror. Routers purge the old life, so that is always right, whatever happened before.

Owns: the life (epoch, seq), when batches go out, the heartbeat, and registering again.
Does not: know Redis (the writer does), or ask the cache anything: events are all it hears.
Invariants: entries of a life are numbered 1, 2, 3... and reach the index in that order or end the life; an entry whose
answer was lost is sent again unchanged (after a failover, routers may have seen the first one); memory for unpublished
events is bounded however long the index is away.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from cluster.config import IndexConfig
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, ReplicaInfo, ReplicaLoad
from cluster.index.background import end_task
from cluster.index.base import NO_EPOCH, Fenced, IndexUnavailable, IndexWriter, RegistrationGone
from worker.event_backlog import EventBacklog

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 1.0


class CacheReporter:
    """One per replica process; all methods are called on its event loop."""

    def __init__(
        self,
        writer: IndexWriter,
        info: ReplicaInfo,
        config: IndexConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_pending_chunks: int = 65_536,
    ) -> None:
        self._writer = writer
        self._info = info
        self._interval_s = config.publish_interval_s
        self._heartbeat_s = config.heartbeat_s
        self._timeout_s = config.timeout_s
        self._clock = clock
        self._backlog = EventBacklog(max_pending_chunks)
        self._epoch: Epoch | None = None
        self._last_epoch = NO_EPOCH
        self._seq = 0
        self._unanswered: list[CacheEvent] = []  # sent as entry seq + 1 of this life, nobody knows whether it arrived
        self._load = ReplicaLoad()
        self._work = asyncio.Event()  # something to publish, or no life to publish in
        self._urgent = asyncio.Event()  # do not wait for the interval
        self._last_publish = float("-inf")
        self._tasks: list[asyncio.Task[None]] = []
        self._reachable = True
        self.registrations = 0
        self.overflows = 0

    @property
    def epoch(self) -> Epoch | None:
        """The current life; None while there is none in the index."""
        return self._epoch

    @property
    def seq(self) -> int:
        """The last entry published in this life."""
        return self._seq

    @property
    def chunks(self) -> list[ChunkHash]:
        """What the cache holds, parents before children."""
        return self._backlog.chunks

    @property
    def pending_chunks(self) -> int:
        return self._backlog.pending_chunks + sum(len(event.chunk_hashes) for event in self._unanswered)

    def set_load(self, load: ReplicaLoad) -> None:
        """What the next heartbeats carry."""
        self._load = load

    def record(self, events: Iterable[CacheEvent]) -> None:
        """Note what changed in the cache. Never waits, never fails for want of an index."""
        for event in events:
            if event.kind is CacheEventKind.CLEARED:
                self._urgent.set()
            if not self._backlog.record(event):
                self.overflows += 1
                self._end_life()
        if self._backlog:
            self._work.set()

    async def start(self) -> None:
        """Register and begin to publish. When the index is away, go on trying in the background."""
        if self._tasks:
            return
        try:
            await self._register()
        except IndexUnavailable as error:
            self._note_unreachable(error)
        except (Fenced, RegistrationGone):
            self._end_life()
        self._work.set()
        self._tasks = [
            asyncio.create_task(self._publish_forever(), name="cache-reporter-publish"),
            asyncio.create_task(self._beat_forever(), name="cache-reporter-heartbeat"),
        ]

    async def close(self) -> None:
        """Stop, and leave the index if that is possible within the timeout."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            await end_task(task)
        epoch, self._epoch = self._epoch, None
        if epoch is None:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._writer.deregister(self._info.worker_id, epoch)
        except (IndexUnavailable, TimeoutError) as error:
            logger.info("not deregistered; the heartbeat will expire: %s", error)

    async def _publish_forever(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            await self._work.wait()
            try:
                if self._epoch is None:
                    await self._register()
                await self._wait_for_interval()
                await self._flush()
                backoff_s = _FIRST_BACKOFF_S
            except (Fenced, RegistrationGone) as error:
                logger.warning("the index lost this life, publishing all under a new epoch: %s", error)
                self._end_life()
            except IndexUnavailable as error:
                self._note_unreachable(error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
            except Exception:
                logger.exception("publishing failed; publishing all under a new epoch")
                self._end_life()
                await asyncio.sleep(_LONGEST_BACKOFF_S)

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            epoch = self._epoch
            if epoch is None:
                continue
            try:
                await self._writer.heartbeat(self._info.worker_id, epoch, self._load, self._seq)
                self._reachable = True
            except (Fenced, RegistrationGone) as error:
                if self._epoch == epoch:
                    logger.warning("the index lost this life, publishing all under a new epoch: %s", error)
                    self._end_life()
            except IndexUnavailable as error:
                self._note_unreachable(error)
            except Exception:
                logger.exception("a heartbeat failed")

    async def _register(self) -> None:
        """Begin a new life whose first entries are the mirror; routers take it in with its first heartbeat."""
        epoch = await self._writer.register(self._info, self._last_epoch)
        self._backlog.restart()
        self._epoch, self._last_epoch, self._seq = epoch, epoch, 0
        self.registrations += 1
        self._reachable = True
        self._last_publish = float("-inf")
        chunks = self._backlog.pending_chunks
        logger.info("registered as %s, epoch %d, %d chunks to publish", self._info.worker_id, epoch, chunks)
        await self._writer.heartbeat(self._info.worker_id, epoch, self._load)

    async def _wait_for_interval(self) -> None:
        wait_s = self._last_publish + self._interval_s - self._clock()
        if wait_s <= 0:
            return
        try:
            async with asyncio.timeout(wait_s):
                await self._urgent.wait()
        except TimeoutError:
            return

    async def _flush(self) -> None:
        """Publish until nothing is pending, or the life is over. A batch without an answer is the next one again."""
        while (self._unanswered or self._backlog) and self._epoch is not None:
            epoch = self._epoch
            batch = self._unanswered = self._unanswered or self._backlog.take()
            await self._writer.publish(self._info.worker_id, epoch, self._seq + 1, batch)
            if self._epoch == epoch:
                self._seq += 1
                self._unanswered = []
        self._last_publish = self._clock()
        self._urgent.clear()
        if self._epoch is not None:
            self._work.clear()

    def _end_life(self) -> None:
        """From here on only the mirror counts; the next register publishes it."""
        self._epoch = None
        self._unanswered = []
        self._backlog.discard()
        self._work.set()

    def _note_unreachable(self, error: IndexUnavailable) -> None:
        if self._reachable:
            logger.warning("index unreachable, serving goes on and events are kept: %s", error)
        self._reachable = False
