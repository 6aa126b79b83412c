"""CacheReporter: after any outage the index holds exactly the reporter's mirror, in gapless lives."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
from replica_infos import replica_info

from cluster.config import IndexConfig
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, ReplicaInfo, ReplicaLoad, WorkerId
from cluster.index.base import MAX_CHUNKS_PER_ENTRY, NO_EPOCH, Fenced, IndexUnavailable, RegistrationGone
from worker.cache_reporter import CacheReporter

A = WorkerId("a")
CLEARED = CacheEvent(CacheEventKind.CLEARED)
INFO = replica_info("a")


def chunks(count: int, start: int = 0) -> list[ChunkHash]:
    return [ChunkHash(number.to_bytes(16, "little")) for number in range(start, start + count)]


def stored(*hashes: ChunkHash) -> CacheEvent:
    return CacheEvent(CacheEventKind.STORED, hashes)


def removed(*hashes: ChunkHash) -> CacheEvent:
    return CacheEvent(CacheEventKind.REMOVED, hashes)


class FakeWriter:
    """An index that checks what it is told. `down`, `lose_answers` and `forget()` are what can go wrong."""

    def __init__(self) -> None:
        self.down = False
        self.lose_answers = 0
        self.epoch: Epoch | None = None
        self.seq = 0
        self.held: dict[ChunkHash, None] = {}
        self.entries: list[tuple[float, Epoch, int, list[CacheEvent]]] = []
        self.beats: list[tuple[Epoch, ReplicaLoad]] = []
        self.registrations = 0
        self.stuck: asyncio.Event | None = None

    def forget(self) -> None:
        self.epoch, self.seq, self.held = None, 0, {}

    async def register(self, info: ReplicaInfo, after: Epoch = NO_EPOCH) -> Epoch:
        await self._reach()
        self.registrations += 1
        self.forget()
        self.epoch = Epoch(1000 + self.registrations)
        assert self.epoch > after
        return self.epoch

    async def publish(self, worker_id: WorkerId, epoch: Epoch, seq: int, events: Sequence[CacheEvent]) -> None:
        await self._reach()
        self._check(epoch)
        if seq != self.seq + 1:
            raise Fenced("seq")
        assert sum(len(event.chunk_hashes) for event in events) <= MAX_CHUNKS_PER_ENTRY
        self.seq = seq
        self.entries.append((time.monotonic(), epoch, seq, list(events)))
        for event in events:
            if event.kind is CacheEventKind.STORED:
                self.held.update(dict.fromkeys(event.chunk_hashes))
            elif event.kind is CacheEventKind.REMOVED:
                for chunk in event.chunk_hashes:
                    self.held.pop(chunk, None)
            else:
                self.held.clear()
        if self.lose_answers:
            self.lose_answers -= 1
            raise IndexUnavailable("the answer was lost")

    async def heartbeat(self, worker_id: WorkerId, epoch: Epoch, load: ReplicaLoad, seq: int = 0) -> None:
        await self._reach()
        self._check(epoch)
        if seq > self.seq:
            raise Fenced("it acknowledged more than it has")
        self.beats.append((epoch, load))

    async def deregister(self, worker_id: WorkerId, epoch: Epoch) -> bool:
        if self.stuck is not None:
            await self.stuck.wait()
        await self._reach()
        self._check(epoch)
        self.forget()
        return True

    async def _reach(self) -> None:
        await asyncio.sleep(0)
        if self.down:
            raise IndexUnavailable("switched off by the test")

    def _check(self, epoch: Epoch) -> None:
        if self.epoch is None:
            raise RegistrationGone("no registration")
        if self.epoch != epoch:
            raise Fenced("epoch")


CONFIG = IndexConfig(heartbeat_s=0.02, heartbeat_ttl_s=0.1, publish_interval_s=0.005, timeout_s=0.3)


@pytest.fixture
def writer() -> FakeWriter:
    return FakeWriter()


@pytest.fixture
async def make_reporter(writer: FakeWriter) -> AsyncIterator[Callable[..., CacheReporter]]:
    made: list[CacheReporter] = []

    def make(config: IndexConfig = CONFIG, max_pending_chunks: int = 65_536) -> CacheReporter:
        made.append(CacheReporter(writer, INFO, config, max_pending_chunks=max_pending_chunks))
        return made[-1]

    yield make
    for reporter in made:
        await reporter.close()


Make = Callable[..., CacheReporter]


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        await asyncio.sleep(0.002)


def settle(reporter: CacheReporter, writer: FakeWriter) -> Awaitable[None]:
    def settled() -> bool:
        same_life = reporter.epoch is not None and reporter.epoch == writer.epoch
        return same_life and reporter.pending_chunks == 0 and list(writer.held) == reporter.chunks

    return eventually(settled)


async def test_registers_beats_and_publishes_from_seq_one(writer: FakeWriter, make_reporter: Make) -> None:
    reporter = make_reporter()
    assert reporter.epoch is None
    reporter.set_load(ReplicaLoad(running=1))
    await reporter.start()
    assert reporter.epoch == 1001
    assert writer.beats == [(1001, ReplicaLoad(running=1))]
    reporter.record([stored(*chunks(3))])
    await settle(reporter, writer)
    reporter.record([removed(chunks(3)[2])])
    await settle(reporter, writer)
    assert [(epoch, seq) for _, epoch, seq, _ in writer.entries] == [(1001, 1), (1001, 2)]
    assert reporter.seq == 2
    reporter.set_load(ReplicaLoad(running=2))
    await eventually(lambda: writer.beats[-1] == (1001, ReplicaLoad(running=2)))


async def test_what_was_recorded_before_the_start_is_published(writer: FakeWriter, make_reporter: Make) -> None:
    reporter = make_reporter()
    reporter.record([stored(*chunks(5)), removed(chunks(5)[4])])
    await reporter.start()
    await eventually(lambda: list(writer.held) == chunks(4))


async def test_events_between_two_batches_go_out_together(writer: FakeWriter, make_reporter: Make) -> None:
    reporter = make_reporter(CONFIG.model_copy(update={"publish_interval_s": 0.1}))
    await reporter.start()
    reporter.record([stored(chunks(1)[0])])
    await eventually(lambda: len(writer.entries) == 1)
    for number in range(1, 20):
        reporter.record([stored(chunks(1, number)[0])])
        await asyncio.sleep(0.001)
    await settle(reporter, writer)
    assert len(writer.entries) == 2
    assert writer.entries[1][0] - writer.entries[0][0] > 0.09
    assert writer.entries[1][3] == [stored(*chunks(19, 1))]


async def test_a_clear_goes_out_at_once_and_alone(writer: FakeWriter, make_reporter: Make) -> None:
    reporter = make_reporter(CONFIG.model_copy(update={"publish_interval_s": 30.0}))
    await reporter.start()
    reporter.record([stored(*chunks(3))])
    await eventually(lambda: len(writer.entries) == 1)
    reporter.record([stored(*chunks(3, 3)), CLEARED])
    await eventually(lambda: len(writer.entries) == 2, 2)
    assert writer.entries[1][3] == [CLEARED]
    assert writer.held == {}


async def test_large_events_are_cut_to_size(writer: FakeWriter, make_reporter: Make) -> None:
    reporter = make_reporter()
    await reporter.start()
    reporter.record([stored(*chunks(2500)), removed(*reversed(chunks(1200, 1300)))])
    await settle(reporter, writer)
    assert list(writer.held) == chunks(1300)
    assert len(writer.entries) == 4


async def test_registration_gone_republishes_the_mirror_under_a_new_epoch(
    writer: FakeWriter, make_reporter: Make
) -> None:
    reporter = make_reporter()
    await reporter.start()
    reporter.record([stored(*chunks(2500))])
    await settle(reporter, writer)
    writer.forget()  # the index came back empty; only the heartbeat can notice
    await eventually(lambda: reporter.epoch == 1002)
    await settle(reporter, writer)
    assert [seq for _, epoch, seq, _ in writer.entries if epoch == 1002] == [1, 2, 3]
    reporter.record([removed(chunks(2500)[2499])])
    await settle(reporter, writer)
    assert writer.entries[-1][1:3] == (1002, 4)


async def test_a_failover_that_lost_entries_is_noticed_by_the_next_publish(
    writer: FakeWriter, make_reporter: Make
) -> None:
    reporter = make_reporter(CONFIG.model_copy(update={"heartbeat_s": 30.0, "heartbeat_ttl_s": 90.0}))
    await reporter.start()
    reporter.record([stored(*chunks(3))])
    await settle(reporter, writer)
    writer.seq -= 1
    writer.held.clear()
    reporter.record([stored(*chunks(1, 3))])
    await settle(reporter, writer)
    assert reporter.epoch == 1002
    assert list(writer.held) == chunks(4)


async def test_a_lost_answer_never_applies_a_batch_twice(writer: FakeWriter, make_reporter: Make) -> None:
    reporter = make_reporter()
    await reporter.start()
    writer.lose_answers = 1
    reporter.record([stored(*chunks(2))])
    await eventually(lambda: reporter.epoch == 1002)
    await settle(reporter, writer)
    assert [(epoch, seq) for _, epoch, seq, _ in writer.entries] == [(1001, 1), (1002, 1)]


async def test_a_batch_without_an_answer_is_sent_again_unchanged(writer: FakeWriter, make_reporter: Make) -> None:
    """Routers may have read it from a server that is gone: another entry of that number would be skipped by them."""
    reporter = make_reporter()
    await reporter.start()
    seq, held = writer.seq, dict(writer.held)
    writer.lose_answers = 1
    reporter.record([stored(*chunks(2))])
    await eventually(lambda: len(writer.entries) == 1)
    writer.seq, writer.held = seq, held  # a server took over that does not have it
    reporter.record([CLEARED, stored(*chunks(3, 7))])
    await settle(reporter, writer)
    first, again, *rest = writer.entries
    assert again[1:] == first[1:]
    assert [entry[2] for entry in rest] == [2]
    assert writer.registrations == 1
    assert list(writer.held) == chunks(3, 7)


async def test_an_idle_worker_notices_an_index_that_lost_its_entries(writer: FakeWriter, make_reporter: Make) -> None:
    reporter = make_reporter()
    await reporter.start()
    reporter.record([stored(*chunks(3))])
    await settle(reporter, writer)
    writer.seq = 0
    writer.held.clear()
    await eventually(lambda: reporter.epoch == 1002)
    await settle(reporter, writer)
    assert list(writer.held) == chunks(3)


async def test_unreachable_at_start_keeps_trying(writer: FakeWriter, make_reporter: Make) -> None:
    writer.down = True
    reporter = make_reporter()
    await reporter.start()
    assert reporter.epoch is None
    reporter.record([stored(*chunks(3))])
    await asyncio.sleep(0.05)
    writer.down = False
    await settle(reporter, writer)
    assert writer.registrations == 1
    assert list(writer.held) == chunks(3)


async def test_a_short_outage_keeps_the_life_and_the_order(writer: FakeWriter, make_reporter: Make) -> None:
    reporter = make_reporter()
    await reporter.start()
    reporter.record([stored(*chunks(3))])
    await settle(reporter, writer)
    writer.down = True
    reporter.record([removed(chunks(3)[2])])
    await asyncio.sleep(0.02)
    reporter.record([stored(*chunks(2, 5)), removed(chunks(1, 6)[0])])
    await asyncio.sleep(0.02)
    writer.down = False
    await settle(reporter, writer)
    assert writer.registrations == 1
    assert list(writer.held) == [*chunks(2), *chunks(1, 5)]


async def test_a_long_outage_is_bounded_and_ends_in_a_new_epoch(writer: FakeWriter, make_reporter: Make) -> None:
    reporter = make_reporter(max_pending_chunks=100)
    await reporter.start()
    reporter.record([stored(*chunks(10))])
    await settle(reporter, writer)
    writer.down = True
    for _ in range(50):
        reporter.record([stored(*chunks(20, 10)), removed(*reversed(chunks(20, 10)))])
        assert reporter.pending_chunks <= 10 + 20 + 100
        await asyncio.sleep(0)
    assert reporter.overflows == 1
    writer.down = False
    await settle(reporter, writer)
    assert list(writer.held) == chunks(10)
    assert reporter.epoch == 1002


async def test_the_mirror_lists_parents_before_children(writer: FakeWriter, make_reporter: Make) -> None:
    reporter = make_reporter()
    first, second, third = chunks(3)
    reporter.record([stored(first, second, third), removed(third, second), stored(second), stored(third)])
    reporter.record([removed(third), stored(first, second, third)])
    assert reporter.chunks == [first, second, third]


async def test_close_deregisters_and_beats_no_more(writer: FakeWriter, make_reporter: Make) -> None:
    reporter = make_reporter()
    await reporter.start()
    await reporter.close()
    assert writer.epoch is None
    assert reporter.epoch is None
    beats = len(writer.beats)
    await asyncio.sleep(0.05)
    assert len(writer.beats) == beats


@pytest.mark.parametrize("trouble", ["down", "stuck"])
async def test_close_is_bounded_when_the_index_is_away(writer: FakeWriter, make_reporter: Make, trouble: str) -> None:
    reporter = make_reporter()
    await reporter.start()
    writer.down = trouble == "down"
    writer.stuck = asyncio.Event() if trouble == "stuck" else None
    started = time.monotonic()
    await reporter.close()
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("seed", range(5))
async def test_any_mix_of_trouble_ends_with_the_index_equal_to_the_mirror(
    writer: FakeWriter, make_reporter: Make, seed: int
) -> None:
    rng = random.Random(seed)
    config = CONFIG.model_copy(update={"publish_interval_s": 0.0, "heartbeat_s": 0.005})
    reporter = make_reporter(config, max_pending_chunks=50)
    await reporter.start()
    depth = 0
    for _ in range(300):
        step = rng.random()
        if step < 0.45:
            grown = rng.randint(1, 30)
            reporter.record([stored(*chunks(grown, depth))])
            depth += grown
        elif step < 0.8:
            shrunk = rng.randint(0, min(depth, 30))
            depth -= shrunk
            reporter.record([removed(*reversed(chunks(shrunk, depth)))])
        elif step < 0.83:
            reporter.record([CLEARED])
            depth = 0
        elif step < 0.9:
            writer.down = not writer.down
        elif step < 0.95:
            writer.lose_answers = 1
        else:
            writer.forget()
        await asyncio.sleep(rng.choice([0, 0, 0.001]))
    writer.down, writer.lose_answers = False, 0
    await settle(reporter, writer)
    assert reporter.chunks == chunks(depth)
    by_life: dict[Epoch, list[int]] = {}
    for _, epoch, seq, _ in writer.entries:
        by_life.setdefault(epoch, []).append(seq)
    assert all(seqs == list(range(1, len(seqs) + 1)) for seqs in by_life.values())
