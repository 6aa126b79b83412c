"""IndexFollower: the in-process index equals what the workers hold, whatever is lost, repeated, late or dead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from cluster.config import IndexConfig
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, ReplicaInfo, ReplicaLoad, WorkerId
from cluster.index.base import IndexEntry, IndexReader
from cluster.index.follower import FollowerState, IndexFollower
from cluster.index.memory import MemoryIndex
from cluster.index.private_server import PrivateRedis
from cluster.index.redis_reader import RedisReader
from cluster.index.redis_writer import RedisWriter
from worker.cache_reporter import CacheReporter

A, B = WorkerId("a"), WorkerId("b")
LOAD = ReplicaLoad(waiting=1)
CLEARED = CacheEvent(CacheEventKind.CLEARED)
MakeInfo = Callable[..., ReplicaInfo]
Chain = Callable[..., list[ChunkHash]]
Eventually = Callable[..., Awaitable[None]]
Store = Any  # FakeStore of conftest.py, which cannot be imported


def stored(*chunks: ChunkHash) -> CacheEvent:
    return CacheEvent(CacheEventKind.STORED, chunks)


def removed(*chunks: ChunkHash) -> CacheEvent:
    return CacheEvent(CacheEventKind.REMOVED, chunks)


class Router:
    """A follower with its index."""

    def __init__(self, reader: IndexReader, config: IndexConfig) -> None:
        self.index = MemoryIndex()
        self.follower = IndexFollower(reader, self.index, config, "the-route-digest")

    def holds(self, worker_id: WorkerId, prompt: list[ChunkHash], num_chunks: int) -> bool:
        return self.index.overlaps(prompt).get(worker_id, 0) == num_chunks

    def in_step(self, worker_id: WorkerId) -> bool:
        known = self.follower.workers.get(worker_id)
        return known is not None and known.in_step

    @property
    def counters(self) -> Any:
        return self.follower.counters


@pytest.fixture
async def start_router(index_config: IndexConfig) -> AsyncIterator[Callable[..., Awaitable[Router]]]:
    routers: list[Router] = []

    async def start(reader: IndexReader, wait: bool = True) -> Router:
        router = Router(reader, index_config)
        routers.append(router)
        await router.follower.start()
        if wait:
            assert await router.follower.wait_ready(5)
        return router

    yield start
    for router in routers:
        await router.follower.close()
        router.index.check_invariants()


Start = Callable[..., Awaitable[Router]]


async def join(store: Store, info: ReplicaInfo, *chunks: ChunkHash) -> Epoch:
    """A worker that has registered, beats, and has published these chunks as entry 1."""
    epoch: Epoch = await store.register(info)
    await store.heartbeat(info.worker_id, epoch, LOAD)
    await store.publish(info.worker_id, epoch, 1, [stored(*chunks)])
    return epoch


async def test_follows_what_workers_publish(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    prompt = chain(4)
    router = await start_router(fake_store)
    assert router.follower.state is FollowerState.FOLLOWING
    epoch = await join(fake_store, make_info("a"), *prompt[:2])
    await eventually(lambda: router.holds(A, prompt, 2))
    known = router.follower.workers[A]
    assert (known.epoch, known.load, known.info, known.indexed) == (epoch, LOAD, make_info("a"), True)
    assert 0 <= known.load_age_s(time.monotonic()) < 5
    await fake_store.publish(A, epoch, 2, [stored(*prompt[2:])])
    await eventually(lambda: router.holds(A, prompt, 4))
    await fake_store.publish(A, epoch, 3, [CLEARED])
    await eventually(lambda: router.holds(A, prompt, 0))
    assert router.counters.applied == 2
    assert router.counters.repaired == 0


async def test_loads_are_taken_from_every_heartbeat(
    fake_store: Store, start_router: Start, make_info: MakeInfo, eventually: Eventually
) -> None:
    epoch = await join(fake_store, make_info("a"))
    router = await start_router(fake_store)
    await fake_store.heartbeat(A, epoch, ReplicaLoad(waiting=9))
    await eventually(lambda: router.follower.workers[A].load.waiting == 9)


async def test_router_restart_with_warm_workers_has_the_full_snapshot_before_ready(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain
) -> None:
    prompt = chain(3000)
    for name in ("a", "b"):
        epoch = await join(fake_store, make_info(name), *prompt[:1000])
        await fake_store.publish(WorkerId(name), epoch, 2, [stored(*prompt[1000:])])
    fake_store.stream.clear()  # trimmed long ago: only the snapshots know
    router = await start_router(fake_store, wait=False)
    assert router.follower.state is FollowerState.COLD
    seen_before_ready = []
    while not router.follower.ready:
        seen_before_ready.append(router.index.chunk_count(A))
        await asyncio.sleep(0)
    assert len(seen_before_ready) > 2
    assert router.index.overlaps(prompt) == {A: 3000, B: 3000}


async def test_event_gap_is_repaired_by_snapshot(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    prompt = chain(6)
    epoch = await join(fake_store, make_info("a"), *prompt[:2])
    router = await start_router(fake_store)
    await fake_store.publish(A, epoch, 2, [stored(*prompt[2:4])])
    fake_store.stream.pop()  # lost on the way
    await fake_store.publish(A, epoch, 3, [stored(*prompt[4:])])
    await eventually(lambda: router.holds(A, prompt, 6))
    assert router.counters.repaired == 1
    await fake_store.publish(A, epoch, 4, [removed(prompt[5])])
    await eventually(lambda: router.holds(A, prompt, 5))
    assert router.counters.repaired == 1


async def test_a_lost_entry_without_a_follower_is_repaired_too(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    prompt = chain(4)
    epoch = await join(fake_store, make_info("a"), *prompt)
    router = await start_router(fake_store)
    await fake_store.publish(A, epoch, 2, [removed(prompt[3])])
    fake_store.stream.pop()
    await eventually(lambda: router.holds(A, prompt, 3))
    assert router.counters.repaired == 1


async def test_an_idle_worker_is_not_read_again(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    epoch = await join(fake_store, make_info("a"), *chain(2))
    router = await start_router(fake_store)
    for seq in range(2, 20):
        await fake_store.publish(A, epoch, seq, [stored(*chain(seq))])
        await asyncio.sleep(0.01)
    await eventually(lambda: router.holds(A, chain(19), 19))
    assert fake_store.snapshots_read == 1
    assert router.counters.applied == 18


async def test_duplicate_and_reordered_entries(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    prompt = chain(4)
    epoch = await join(fake_store, make_info("a"), *prompt)
    router = await start_router(fake_store)
    await fake_store.publish(A, epoch, 2, [removed(prompt[3])])
    await fake_store.publish(A, epoch, 3, [removed(prompt[2])])
    second, third = fake_store.stream[-2].entry, fake_store.stream[-1].entry
    del fake_store.stream[-2:]
    for entry in (third, second, third, second, fake_store.stream[0].entry):
        fake_store.push(entry)
    await eventually(lambda: router.counters.skipped == 4 and router.in_step(A))
    assert router.holds(A, prompt, 2)
    assert (router.counters.repaired, router.counters.applied) == (1, 0)


async def test_removed_then_replayed_stored_never_resurrects(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    prompt = chain(2)
    epoch = await join(fake_store, make_info("a"), *prompt)
    router = await start_router(fake_store)
    await fake_store.publish(A, epoch, 2, [removed(*reversed(prompt))])
    await eventually(lambda: router.holds(A, prompt, 0))
    fake_store.push(fake_store.stream[0].entry)  # "stored", seq 1, once more
    fake_store.push(IndexEntry(A, Epoch(epoch - 1), 3, (stored(*prompt),)))  # an earlier life's
    await eventually(lambda: router.counters.skipped == 2)
    assert router.holds(A, prompt, 0)
    assert router.index.total_records() == 0


async def test_corrupt_entry_is_skipped_and_counted(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    prompt = chain(6)
    epoch = await join(fake_store, make_info("a"), *prompt[:2])
    router = await start_router(fake_store)
    fake_store.push(None)
    await fake_store.publish(A, epoch, 2, [stored(*prompt[2:4])])
    await eventually(lambda: router.holds(A, prompt, 4))
    assert router.counters.bad == 1
    assert router.counters.repaired == 0
    assert router.follower.state is FollowerState.FOLLOWING


async def test_restart_in_place_purges_the_old_life(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    old, new = chain(4), chain(4, "new")
    first = await join(fake_store, make_info("a"), *old)
    router = await start_router(fake_store)
    assert router.holds(A, old, 4)
    second = await join(fake_store, make_info("a"), *new)
    await eventually(lambda: router.holds(A, new, 4))
    assert router.holds(A, old, 0)
    assert router.follower.workers[A].epoch == second > first
    fake_store.push(IndexEntry(A, first, 2, (stored(*old),)))  # what the old process had still sent
    await fake_store.publish(A, second, 2, [removed(new[3])])
    await eventually(lambda: router.holds(A, new, 3))
    assert router.holds(A, old, 0)


async def test_heartbeat_expiry_drops_and_its_return_brings_the_snapshot_back(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    prompt = chain(3)
    epoch = await join(fake_store, make_info("a"), *prompt)
    router = await start_router(fake_store)
    del fake_store.beats[A]
    await eventually(lambda: A not in router.follower.workers)
    assert router.index.live() == {}
    await eventually(lambda: router.index.total_records() == 0)
    await fake_store.publish(A, epoch, 2, [removed(prompt[2])])
    await fake_store.heartbeat(A, epoch, LOAD)
    await eventually(lambda: router.holds(A, prompt, 2))


async def test_a_worker_dropped_for_death_comes_back_only_with_a_new_epoch(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    prompt = chain(3)
    epoch = await join(fake_store, make_info("a"), *prompt)
    await join(fake_store, make_info("b"), *prompt)
    router = await start_router(fake_store)
    router.follower.drop(A)
    router.follower.drop(A)
    assert A not in router.follower.workers
    assert router.index.overlaps(prompt) == {B: 3}
    await fake_store.publish(A, epoch, 2, [stored(*chain(4))])  # its heartbeat and its last words are still there
    await asyncio.sleep(0.15)
    assert A not in router.follower.workers
    assert router.index.overlaps(prompt) == {B: 3}
    second = await join(fake_store, make_info("a"), *prompt[:1])
    await eventually(lambda: router.holds(A, prompt, 1))
    assert router.follower.workers[A].epoch == second


async def test_a_worker_that_died_before_it_was_known_is_not_taken_in(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain
) -> None:
    router = await start_router(fake_store)
    await join(fake_store, make_info("a"), *chain(2))
    router.follower.drop(A)
    await asyncio.sleep(0.15)
    assert router.follower.workers == {}


async def test_a_drop_during_its_snapshot_wins(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain
) -> None:
    await join(fake_store, make_info("a"), *chain(900))
    router: Router | None = None

    async def drop() -> None:
        assert router is not None
        router.follower.drop(A)

    fake_store.during_snapshot = drop
    router = await start_router(fake_store, wait=False)
    assert await router.follower.wait_ready(5)
    assert router.index.live() == {}
    assert router.follower.workers == {}


async def test_concurrent_publish_during_snapshot(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    prompt = chain(40)
    epoch = await join(fake_store, make_info("a"), *prompt[:2])

    async def publish_meanwhile() -> None:
        seq = fake_store.records[A].seq + 1
        await fake_store.publish(A, epoch, seq, [removed(prompt[1])])
        await fake_store.publish(A, epoch, seq + 1, [stored(*prompt[1 : seq + 4])])

    fake_store.during_snapshot = publish_meanwhile
    router = await start_router(fake_store)
    await eventually(lambda: router.holds(A, prompt, 6))
    assert (router.counters.applied, router.counters.repaired) == (2, 0)

    await fake_store.publish(A, epoch, 4, [CLEARED])
    fake_store.stream.pop()  # a gap, and again events arrive while the snapshot is read
    await fake_store.publish(A, epoch, 5, [stored(*prompt[:3])])
    await eventually(lambda: router.holds(A, prompt, 10))
    assert (router.counters.applied, router.counters.repaired) == (4, 1)


async def test_another_route_scheme_gets_load_only(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    epoch = await join(fake_store, make_info("a", route_digest="another"), *chain(2))
    router = await start_router(fake_store)
    await fake_store.publish(A, epoch, 2, [stored(*chain(3))])
    await eventually(lambda: router.counters.skipped == 1)
    assert router.follower.workers[A].load == LOAD
    assert router.follower.workers[A].indexed is False
    assert router.index.overlaps(chain(3)) == {}
    assert router.counters.scheme_mismatches == 1


async def test_index_down_keeps_last_index_and_loads(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    prompt = chain(3)
    epoch = await join(fake_store, make_info("a"), *prompt)
    router = await start_router(fake_store)
    fake_store.down = True
    await eventually(lambda: router.follower.state is FollowerState.UNREACHABLE)
    fake_store.beats.clear()
    await asyncio.sleep(0.3)
    assert router.holds(A, prompt, 3)
    assert router.follower.workers[A].load == LOAD
    assert router.follower.ready
    fake_store.down = False
    await eventually(lambda: router.follower.state is FollowerState.FOLLOWING)
    assert router.holds(A, prompt, 3)  # no heartbeat yet, but it gets the time to send one
    await fake_store.publish(A, epoch, 2, [removed(prompt[2])])
    await fake_store.heartbeat(A, epoch, LOAD)
    await eventually(lambda: router.holds(A, prompt, 2))
    del fake_store.beats[A]
    await eventually(lambda: A not in router.follower.workers)


async def test_what_was_missed_while_down_is_read_from_the_snapshot(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    prompt = chain(3)
    epoch = await join(fake_store, make_info("a"), *prompt)
    router = await start_router(fake_store)
    fake_store.down = True
    await eventually(lambda: router.follower.state is FollowerState.UNREACHABLE)
    fake_store.down = False
    await fake_store.publish(A, epoch, 2, [removed(prompt[2])])
    fake_store.stream.clear()
    await eventually(lambda: router.holds(A, prompt, 2))


async def test_a_stream_that_went_back_is_followed_from_its_new_end(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    prompt = chain(5)
    epoch = await join(fake_store, make_info("a"), *prompt[:1])
    for seq in range(2, 5):
        await fake_store.publish(A, epoch, seq, [stored(prompt[seq - 1])])
    router = await start_router(fake_store)
    fake_store.stream.clear()
    await asyncio.sleep(0.15)
    await fake_store.publish(A, epoch, 5, [stored(prompt[4])])
    await eventually(lambda: router.holds(A, prompt, 5))


async def test_not_ready_while_the_index_was_never_reached(fake_store: Store, start_router: Start) -> None:
    fake_store.down = True
    router = await start_router(fake_store, wait=False)
    assert await router.follower.wait_ready(0.1) is False
    assert router.follower.state is FollowerState.UNREACHABLE
    fake_store.down = False
    assert await router.follower.wait_ready(5) is True


async def test_a_large_snapshot_and_its_purge_leave_the_loop_free(
    fake_store: Store, start_router: Start, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    epoch = await join(fake_store, make_info("a"))
    fake_store.records[A].chunks = dict.fromkeys(chain(100_000))
    fake_store.records[A].seq = 2
    router = await start_router(fake_store, wait=False)
    slices: list[float] = []

    async def watch(done: Callable[[], bool]) -> None:
        last = time.thread_time()  # of this thread's own work: the machine may be busy with others'
        while not done():
            await asyncio.sleep(0)
            now = time.thread_time()
            slices.append(now - last)
            last = now

    await watch(lambda: router.follower.ready)
    assert router.index.chunk_count(A) == 100_000
    await fake_store.publish(A, epoch, 3, [CLEARED])
    await watch(lambda: router.index.total_records() == 0)
    assert len(slices) > 190
    slow = [slice_s for slice_s in slices if slice_s > 0.02]  # the target is 5 ms; a slow machine is no fault
    assert len(slow) <= 3, slow  # the stand-in's own snapshot is one


# --- with Redis -------------------------------------------------------------------------------------------------


@pytest.mark.redis
async def test_reporter_and_follower_over_redis(
    redis_writer: RedisWriter,
    redis_reader: RedisReader,
    start_router: Start,
    index_config: IndexConfig,
    make_info: MakeInfo,
    chain: Chain,
    eventually: Eventually,
) -> None:
    prompt = chain(5000)
    reporter = CacheReporter(redis_writer, make_info("a"), index_config)
    reporter.record([stored(*prompt[:4000])])
    await reporter.start()
    router = await start_router(redis_reader)
    await eventually(lambda: router.holds(A, prompt, 4000))
    reporter.record([stored(*prompt[4000:]), removed(prompt[4999])])
    reporter.set_load(ReplicaLoad(running=3))
    await eventually(lambda: router.holds(A, prompt, 4999))
    await eventually(lambda: router.follower.workers[A].load.running == 3)
    await reporter.close()
    await eventually(lambda: A not in router.follower.workers)
    assert router.index.live() == {}


@pytest.mark.redis
async def test_a_silent_worker_expires_over_redis(
    redis_writer: RedisWriter,
    redis_reader: RedisReader,
    start_router: Start,
    make_info: MakeInfo,
    chain: Chain,
    eventually: Eventually,
) -> None:
    epoch = await redis_writer.register(make_info("a"))
    await redis_writer.publish(A, epoch, 1, [stored(*chain(2))])
    await redis_writer.heartbeat(A, epoch, LOAD)
    router = await start_router(redis_reader)
    assert router.holds(A, chain(2), 2)
    await eventually(lambda: router.follower.workers == {}, 2)


@pytest.mark.redis
async def test_redis_killed_and_restarted_empty_workers_republish_and_routers_follow(
    start_router: Start, index_config: IndexConfig, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    prompt = chain(3000)
    server = PrivateRedis().start()
    port = server.port
    writers = [RedisWriter.open(index_config, server.url, "m") for _ in range(2)]
    reader = RedisReader.open(index_config, server.url, "m")
    reporters = [
        CacheReporter(writer, make_info(name), index_config) for writer, name in zip(writers, ("a", "b"), strict=True)
    ]
    for reporter in reporters:
        await reporter.start()
        reporter.record([stored(*prompt[:2000])])
    router = await start_router(reader)
    await eventually(lambda: router.index.overlaps(prompt) == {A: 2000, B: 2000})
    epochs = [reporter.epoch for reporter in reporters]

    await asyncio.to_thread(server.stop)
    await eventually(lambda: router.follower.state is FollowerState.UNREACHABLE)
    reporters[0].record([stored(*prompt[2000:])])  # caches go on changing
    reporters[1].record([removed(*reversed(prompt[1000:2000]))])
    await asyncio.sleep(0.2)
    assert router.index.overlaps(prompt) == {A: 2000, B: 2000}
    assert set(router.follower.workers) == {A, B}

    server = PrivateRedis(port=port)
    await asyncio.to_thread(server.start)
    try:
        await eventually(lambda: router.index.overlaps(prompt) == {A: 3000, B: 1000})
        assert router.follower.state is FollowerState.FOLLOWING
        for reporter, before in zip(reporters, epochs, strict=True):
            assert reporter.epoch is not None
            assert before is not None
            assert reporter.epoch > before
        reporters[1].record([CLEARED])
        await eventually(lambda: router.index.overlaps(prompt) == {A: 3000})
    finally:
        for reporter in reporters:
            await reporter.close()
        await router.follower.close()
        for writer in writers:
            await writer.close()
        await reader.close()
        await asyncio.to_thread(server.stop)
