"""Workers, routers and a shared index that fails in every way: once all is quiet, every index equals every cache.

Workers are real CacheReporters, routers real IndexFollowers; the index is FakeStore, in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from fake_index_store import FakeStore, StoreState
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from replica_infos import replica_info
from virtual_loop import VirtualLoop

from cluster.config import IndexConfig
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, WorkerId
from cluster.index.base import IndexEntry, StreamEntry
from cluster.index.follower import FollowerState, IndexFollower
from cluster.index.memory import MemoryIndex
from worker.cache_reporter import CacheReporter

CONFIG = IndexConfig()
NAMES = [WorkerId(name) for name in "abc"]
CHUNKS = [ChunkHash(bytes([number * 20]) + bytes([number] * 15)) for number in range(12)]
QUIET_S = 10.0
Change = tuple[WorkerId, tuple[ChunkHash, ...], tuple[ChunkHash, ...], int, float]

workers = st.sampled_from(NAMES)
chunk_sets = st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=5, unique=True).map(tuple)
moments = st.sampled_from([0.0, 0.01, 0.06, 0.3, 1.0, 2.5, 4.0])


class Router:
    def __init__(self, store: FakeStore, loop: VirtualLoop) -> None:
        self.index = MemoryIndex()
        self.follower = IndexFollower(store, self.index, CONFIG, "d", loop.time)

    def content(self, worker_id: WorkerId) -> set[ChunkHash]:
        return {chunk for chunk in CHUNKS if self.index.overlaps([chunk]).get(worker_id)}


class IndexWorld(RuleBasedStateMachine):
    """Everything between two rules happens in virtual time, only as long as the rule says."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.store = FakeStore(self.loop.time, CONFIG.heartbeat_ttl_s, page=64, page_s=0.04, look_again_s=0.04)
        self.reporters: dict[WorkerId, CacheReporter] = {}
        self.routers: list[Router] = []
        self.saved: StoreState | None = None
        self._add_router()

    def run_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @initialize()
    def workers_start(self) -> None:
        for worker_id in NAMES:
            self._start(worker_id)

    # Few rules with many forms: hypothesis leaves out whole rules in most runs.

    @rule(changes=st.lists(st.tuples(workers, chunk_sets, chunk_sets, st.integers(0, 9), moments), max_size=4))
    def caches_change(self, changes: list[Change]) -> None:
        for worker_id, stored, removed, clear, wait in changes:
            reporter = self.reporters.get(worker_id)
            if reporter is None:
                continue
            reporter.record([CacheEvent(CacheEventKind.STORED, stored)])
            self.wait(wait)
            if clear == 0:
                reporter.record([CacheEvent(CacheEventKind.CLEARED)])
            held = set(reporter.chunks)
            reporter.record([CacheEvent(CacheEventKind.REMOVED, tuple(chunk for chunk in removed if chunk in held))])
            self.wait(wait)

    @rule(worker_id=workers, how=st.sampled_from(["kill", "close", "replace", "replace", "false alarm"]), wait=moments)
    def worker_changes(self, worker_id: WorkerId, how: str, wait: float) -> None:
        """Replaced: killed as with -9, and one of the same name starts. A false alarm is followed by a new life."""
        reporter = self.reporters.get(worker_id)
        if how == "close" and reporter is not None:
            self.run_for(self.reporters.pop(worker_id).close())
        elif how == "kill":
            self._kill(worker_id)
        else:
            if how == "false alarm":
                self.routers[0].follower.drop(worker_id)
                self.wait(0.1)
            self._kill(worker_id)
            self._start(worker_id)
        self.wait(wait)

    @rule(how=st.sampled_from(["start", "end"]), wait=moments)
    def routers_change(self, how: str, wait: float) -> None:
        if how == "start" and len(self.routers) < 3:
            self._add_router()
        elif how == "end" and len(self.routers) > 1:
            self.run_for(self.routers.pop(0).follower.close())
        self.wait(wait)

    @rule(back=st.sampled_from(["same", "empty", "older", "older, no gap"]), wait=moments)
    def redis_goes_away(self, back: str, wait: float) -> None:
        """Without a gap, clients notice nothing but that the history is another one."""
        self.store.down = back != "older, no gap"
        self.wait(wait)
        if back == "empty":
            self.store.load(None)
        elif back != "same" and self.saved is not None:
            self.store.load(self.saved)
        self.store.down = False

    @rule(changes=st.integers(0, 3), answers=st.integers(0, 2), worker_id=workers, chunks=chunk_sets, wait=moments)
    def replica_takes_over_that_misses_the_last_entries(
        self, changes: int, answers: int, worker_id: WorkerId, chunks: tuple[ChunkHash, ...], wait: float
    ) -> None:
        saved = self.store.save()
        self.store.lose_answers = answers
        reporter = self.reporters.get(worker_id)
        for number in range(changes if reporter else 0):
            assert reporter is not None
            kind = CacheEventKind.REMOVED if number % 2 else CacheEventKind.STORED
            reporter.record([CacheEvent(kind, chunks)])
            self.wait(0.045)  # the routers have read it, a worker without an answer has not asked again
        self.store.load(saved)
        if reporter is not None and answers:
            reporter.record([CacheEvent(CacheEventKind.REMOVED, chunks)])
        self.wait(wait)

    @rule(wait=moments)
    def replica_copies(self, wait: float) -> None:
        self.saved = self.store.save()
        self.wait(wait)

    @rule(
        kind=st.sampled_from(["lost", "trimmed", "again", "swapped", "corrupted", "stranger", "no answer"]),
        how_many=st.integers(1, 4),
        worker_id=workers,
        chunks=chunk_sets,
        data=st.data(),
        wait=moments,
    )
    def stream_suffers(
        self,
        kind: str,
        how_many: int,
        worker_id: WorkerId,
        chunks: tuple[ChunkHash, ...],
        data: st.DataObject,
        wait: float,
    ) -> None:
        """Right after a change, so that the routers have not read it yet."""
        if kind == "no answer":
            self.store.lose_answers = how_many
        self._publish_now(worker_id, chunks)
        stream = self.store.stream
        if kind == "lost":
            del stream[-how_many:]
        elif kind == "trimmed":
            del stream[: 5 * how_many]
        elif kind == "stranger":
            self._stranger_writes(worker_id, data.draw(st.sampled_from([0, 1, 10**9])), data.draw(st.integers(0, 2)))
        elif kind == "again" and stream:
            self.store.push(data.draw(st.sampled_from(stream[-20:])).entry)
        elif kind == "corrupted" and stream:
            stream[-1] = StreamEntry(stream[-1].position, None)
        elif kind == "swapped":
            stream[-2:] = [
                StreamEntry(there.position, other.entry)
                for there, other in zip(stream[-2:], reversed(stream[-2:]), strict=True)
            ]
        self.wait(wait)

    def _publish_now(self, worker_id: WorkerId, chunks: tuple[ChunkHash, ...]) -> None:
        """Until the entry is in the stream, if it gets there, and no longer."""
        reporter = self.reporters.get(worker_id)
        if reporter is None:
            return
        reporter.record([CacheEvent(CacheEventKind.STORED, chunks)])
        length = len(self.store.stream)
        for _ in range(200):
            if len(self.store.stream) > length:
                return
            self.wait(0.001)

    def _stranger_writes(self, worker_id: WorkerId, seq: int, lives_ago: int) -> None:
        """An entry of a life that is over, or far from where the life is."""
        record = self.store.records.get(worker_id)
        epoch = Epoch(1) if record is None else Epoch(record.epoch - lives_ago)
        if record is None or lives_ago or seq <= record.seq or seq == 10**9:
            self.store.push(IndexEntry(worker_id, epoch, seq, (CacheEvent(CacheEventKind.STORED, tuple(CHUNKS)),)))

    @rule()
    def all_is_quiet(self) -> None:
        """The property: every router's index equals the true content, and says so."""
        self.wait(QUIET_S)
        for router in self.routers:
            assert router.follower.state is FollowerState.FOLLOWING
            assert set(router.follower.workers) == set(self.reporters)
            for worker_id in NAMES:
                reporter = self.reporters.get(worker_id)
                assert router.content(worker_id) == set(reporter.chunks if reporter else ())
                if reporter is not None:
                    known = router.follower.workers[worker_id]
                    assert known.in_step
                    assert known.epoch == reporter.epoch
            router.index.check_invariants()
            assert router.index.total_records() == len({c for r in self.reporters.values() for c in r.chunks})

    @invariant()
    def unknown_workers_are_never_credited(self) -> None:
        for router in self.routers:
            assert set(router.index.overlaps(CHUNKS[:1])) <= set(router.follower.workers)

    def teardown(self) -> None:
        try:
            self.all_is_quiet()
        finally:
            self.store.down = False
            for router in self.routers:
                self.run_for(router.follower.close())
            for reporter in self.reporters.values():
                self.run_for(reporter.close())
            self.loop.close()

    def _add_router(self) -> None:
        router = Router(self.store, self.loop)
        self.routers.append(router)
        self.run_for(router.follower.start())

    def _start(self, worker_id: WorkerId) -> None:
        reporter = CacheReporter(self.store, replica_info(worker_id), CONFIG, self.loop.time, max_pending_chunks=8)
        self.reporters[worker_id] = reporter
        reporter.record([CacheEvent(CacheEventKind.STORED, tuple(CHUNKS[:3]))])
        self.run_for(reporter.start())

    def _kill(self, worker_id: WorkerId) -> None:
        reporter = self.reporters.pop(worker_id, None)
        if reporter is not None:
            for task in reporter._tasks:
                task.cancel()
            self.run_for(asyncio.wait(reporter._tasks))
            reporter._tasks = []


IndexWorld.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


TestIndexWorld = IndexWorld.TestCase


def test_virtual_time_is_what_passes() -> None:
    """Ten virtual seconds are over at once; a loop that nothing will ever wake fails."""
    loop = VirtualLoop()
    before = loop.time()
    loop.run_until_complete(asyncio.sleep(10))
    assert loop.time() - before == pytest.approx(10, abs=0.1)
    with pytest.raises(AssertionError, match="for ever"):
        loop.run_until_complete(asyncio.Event().wait())
    loop.close()
