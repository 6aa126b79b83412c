"""States, lag and lives over long times, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fake_index_store import FakeStore
from virtual_loop import VirtualLoop

from cluster.config import IndexConfig
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, ReplicaInfo, WorkerId
from cluster.index.base import IndexEntry, StreamEntry
from cluster.index.followed_life import FollowedLife
from cluster.index.follower import FollowerState, IndexFollower
from cluster.index.memory import MemoryIndex
from worker.cache_reporter import CacheReporter

A, B = WorkerId("a"), WorkerId("b")
CONFIG = IndexConfig()
CLEARED = CacheEvent(CacheEventKind.CLEARED)
MakeInfo = Callable[..., ReplicaInfo]
Chain = Callable[..., list[ChunkHash]]


def stored(*chunks: ChunkHash) -> CacheEvent:
    return CacheEvent(CacheEventKind.STORED, chunks)


class World:
    """One router over a FakeStore whose clock is the loop's."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.store = FakeStore(self.loop.time, CONFIG.heartbeat_ttl_s, look_again_s=0.02)
        self.index = MemoryIndex()
        self.follower = IndexFollower(self.store, self.index, CONFIG, "the-route-digest", self.loop.time)
        self.reporters: list[CacheReporter] = []

    @property
    def state(self) -> str:
        return self.follower.state

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    def worker(self, info: ReplicaInfo, *chunks: ChunkHash) -> CacheReporter:
        reporter = CacheReporter(self.store, info, CONFIG, self.loop.time)
        reporter.record([stored(*chunks)])
        self.run(reporter.start())
        self.reporters.append(reporter)
        return reporter

    def close(self) -> None:
        self.store.down = False
        for reporter in self.reporters:
            self.run(reporter.close())
        self.run(self.follower.close())
        self.loop.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def test_the_default_settings_survive_five_idle_minutes(world: World, make_info: MakeInfo, chain: Chain) -> None:
    """Scenario 27: nobody says anything but heartbeats; nothing is dropped, repaired or registered again."""
    prompt = chain(20)
    reporter = world.worker(make_info("a"), *prompt)
    world.run(world.follower.start())
    world.wait(1)
    epoch = reporter.epoch
    for _ in range(300):
        world.wait(1)
        assert world.index.overlaps(prompt) == {A: 20}
        assert world.state == FollowerState.FOLLOWING
    assert reporter.epoch == epoch
    assert (reporter.registrations, world.store.snapshots_read) == (1, 1)
    assert world.follower.counters.repaired == 0


def test_a_cleared_idle_worker_is_not_credited_for_long(world: World, make_info: MakeInfo, chain: Chain) -> None:
    """Scenario 15: a clear is published at once, without a request or a step after it."""
    prompt = chain(20)
    reporter = world.worker(make_info("a"), *prompt)
    world.run(world.follower.start())
    world.wait(60)
    assert world.index.overlaps(prompt) == {A: 20}
    reporter.record([CLEARED])
    world.wait(CONFIG.publish_interval_s + 0.03)
    assert world.index.overlaps(prompt) == {}


def test_states_from_cold_over_following_to_unreachable_and_back(
    world: World, make_info: MakeInfo, chain: Chain
) -> None:
    world.worker(make_info("a"), *chain(3))
    assert world.state == FollowerState.COLD
    world.store.down = True
    world.run(world.follower.start())
    world.wait(5)
    assert world.state == FollowerState.UNREACHABLE
    world.store.down = False
    world.wait(5)
    assert world.state == FollowerState.FOLLOWING
    assert world.follower.workers[A].in_step
    world.store.down = True
    world.wait(5)
    assert world.state == FollowerState.UNREACHABLE
    assert world.follower.workers[A].in_step  # routed to as before


@pytest.mark.parametrize("apart_s", [0.05, 0.15, 0.25, 0.35, 0.45])
def test_workers_stay_known_while_they_register_again_after_a_flush(
    world: World, make_info: MakeInfo, chain: Chain, apart_s: float
) -> None:
    """No connection breaks, and the first worker may have published again before the router looks."""
    prompt = chain(20)
    reporters = []
    for name in ("a", "b"):
        reporters.append(world.worker(replace(make_info(name), incarnation=name), *prompt))
        world.wait(apart_s)
    world.run(world.follower.start())
    world.wait(5)
    before = [reporter.epoch for reporter in reporters]
    for _ in range(5):
        world.store.load()
        for _ in range(53):
            world.wait(0.02)
            assert world.state == FollowerState.FOLLOWING
            assert world.follower.workers.keys() == {A, B}
        assert world.index.overlaps(prompt) == {A: 20, B: 20}
    assert all(reporter.registrations == 6 for reporter in reporters)
    assert [reporter.epoch for reporter in reporters] == [world.follower.workers[w].epoch for w in (A, B)] != before


def test_who_dies_at_a_flush_is_dropped_after_one_ttl(world: World, make_info: MakeInfo, chain: Chain) -> None:
    prompt = chain(20)
    world.worker(make_info("a"), *prompt)
    dead = world.worker(make_info("b"), *prompt)
    world.run(world.follower.start())
    world.wait(5)
    world.store.load()
    world.run(dead.close())
    world.wait(CONFIG.heartbeat_ttl_s - CONFIG.heartbeat_s)
    assert world.follower.workers.keys() == {A, B}
    world.wait(3 * CONFIG.heartbeat_s)
    assert world.follower.workers.keys() == {A}
    assert world.index.overlaps(prompt) == {A: 20}


def test_stale_while_a_repair_takes_too_long_and_only_that_worker_loses_its_credit(
    world: World, make_info: MakeInfo, chain: Chain
) -> None:
    """Scenarios 16 and 17: batch k is dropped, k + 1 shows it; the snapshot does not come for a while."""
    prompt = chain(4)
    first = world.worker(make_info("a"), *prompt[:2])
    second = world.worker(make_info("b"), *prompt[:1])
    world.run(world.follower.start())
    world.wait(1)
    go_on: asyncio.Event = asyncio.Event()
    world.store.during_snapshot = lambda: wait_for(go_on)
    first.record([stored(prompt[2])])
    world.run(first._flush())
    world.store.stream.pop()
    first.record([stored(prompt[3])])
    second.record([stored(*prompt[1:])])
    world.wait(0.5)
    assert world.state == FollowerState.FOLLOWING
    assert {w: known.in_step for w, known in world.follower.workers.items()} == {A: False, B: True}
    assert world.index.overlaps(prompt)[B] == 4
    world.wait(CONFIG.stale_after_s)
    assert world.state == FollowerState.STALE
    go_on.set()
    world.wait(0.1)
    assert world.state == FollowerState.FOLLOWING
    assert world.index.overlaps(prompt) == {A: 4, B: 4}
    assert all(known.in_step for known in world.follower.workers.values())
    assert world.follower.counters.repaired == 1


async def wait_for(event: asyncio.Event) -> None:
    await event.wait()


def test_lag_is_measured_by_the_servers_clock(world: World, make_info: MakeInfo, chain: Chain) -> None:
    """Entries become visible three seconds late, and the server's clock is an hour ahead of the router's."""
    reporter = world.worker(make_info("a"), *chain(2))
    late = 3.0
    world.store._clock = lambda: world.loop.time() + 3600
    follow = world.store.follow
    moment = world.loop.time

    async def delayed(position: Any, block_ms: int) -> list[StreamEntry]:
        entries = await follow(position, block_ms)
        visible = [e for e in entries if e.position.ms / 1000 <= moment() + 3600 - late]
        if not visible:
            await asyncio.sleep(0.02)
        return visible

    world.run(world.follower.start())
    world.wait(5)
    world.store.follow = delayed  # type: ignore[method-assign]
    world.wait(1)
    for chunk in chain(80)[2:]:
        reporter.record([stored(chunk)])
        world.wait(0.06)
    assert world.follower.counters.lag_s == pytest.approx(late, abs=0.3)
    assert world.state == FollowerState.STALE
    assert not world.follower.workers[A].in_step  # behind what it has published for longer than the bound
    world.wait(5)
    assert world.follower.counters.lag_s == 0
    assert world.state == FollowerState.FOLLOWING
    assert world.follower.workers[A].in_step


def test_a_worker_that_always_has_an_entry_under_way_is_not_late(
    world: World, make_info: MakeInfo, chain: Chain
) -> None:
    reporter = world.worker(make_info("a"))
    world.run(world.follower.start())
    world.wait(1)
    for chunk in chain(400):
        reporter.record([stored(chunk)])
        world.wait(0.05)
        assert world.follower.workers[A].in_step
        assert world.state == FollowerState.FOLLOWING
    assert world.follower.counters.applied > 300


def test_lost_entries_are_found_although_the_router_never_catches_up(
    world: World, make_info: MakeInfo, chain: Chain
) -> None:
    """Another worker's entries keep coming a second late; the last entry of a quiet one is gone."""
    quiet, busy = world.worker(make_info("a"), *chain(2)), world.worker(make_info("b"))
    follow = world.store.follow

    async def delayed(position: Any, block_ms: int) -> list[StreamEntry]:
        entries = await follow(position, block_ms)
        visible = [e for e in entries if e.position.ms / 1000 <= world.loop.time() - 1.0]
        if not visible:
            await asyncio.sleep(0.02)
        return visible

    world.run(world.follower.start())
    world.wait(1)
    world.store.follow = delayed  # type: ignore[method-assign]
    quiet.record([stored(*chain(3)[2:])])
    world.run(quiet._flush())
    world.store.stream.pop()
    for chunk in chain(100, "busy"):
        busy.record([stored(chunk)])
        world.wait(0.05)
    assert world.index.overlaps(chain(3)) == {A: 3}
    assert world.follower.counters.repaired == 1


def test_entries_of_unknown_workers_are_ignored(world: World, make_info: MakeInfo, chain: Chain) -> None:
    """Scenario 11: an id that nobody registered changes nothing, and is counted."""
    world.worker(make_info("a"), *chain(2))
    world.run(world.follower.start())
    world.wait(1)
    for seq in range(1, 6):
        world.store.push(IndexEntry(B, Epoch(7), seq, (stored(*chain(9)),)))
    world.wait(1)
    assert world.index.overlaps(chain(9)) == {A: 2}
    assert world.follower.counters.skipped == 5
    assert set(world.follower.workers) == {A}


def test_many_chunks_that_come_and_go_leave_nothing_behind(world: World, make_info: MakeInfo) -> None:
    """Scenario 13: 100,000 chunks stored and removed again; what is in memory is what is held."""
    reporter = world.worker(make_info("a"))
    world.run(world.follower.start())
    for round_number in range(100):
        chunks = [ChunkHash((round_number * 1000 + n).to_bytes(16, "big")) for n in range(1000)]
        reporter.record([stored(*chunks)])
        world.wait(0.1)
        reporter.record([CacheEvent(CacheEventKind.REMOVED, tuple(reversed(chunks)))])
        world.wait(0.1)
    world.wait(1)
    assert world.follower.counters.applied >= 200
    assert world.index.total_records() == 0
    assert world.follower._lives[A].held_records == 0
    world.index.check_invariants()


def test_a_worker_back_after_a_death_that_was_reported_before_it_was_known(
    world: World, make_info: MakeInfo, chain: Chain
) -> None:
    world.run(world.follower.start())
    world.wait(0.1)
    world.run(world.store.register(make_info("a")))
    world.follower.drop(A)
    world.wait(0.1)
    world.worker(make_info("a"), *chain(3))
    world.wait(1)
    assert world.index.overlaps(chain(3)) == {A: 3}


def test_a_repair_that_overflows_is_begun_again_and_ends_in_the_truth(
    world: World, make_info: MakeInfo, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.index.followed_life.FollowedLife._hold", _hold_little())
    prompt = chain(60)
    reporter = world.worker(make_info("a"), *prompt[:1])
    reads = 0

    async def publish_meanwhile() -> None:
        nonlocal reads
        reads += 1
        if reads < 3:
            for chunk in prompt[20 * reads : 20 * reads + 20]:
                reporter.record([stored(chunk)])
                await asyncio.sleep(0.06)

    world.store.during_snapshot = publish_meanwhile
    reporter.record([stored(*prompt[1:20])])
    world.run(world.follower.start())
    world.wait(10)
    assert reads == 3
    assert world.follower.counters.overflows == 2
    assert world.index.overlaps(prompt) == {A: 60}
    assert world.follower.workers[A].in_step


def _hold_little() -> Callable[..., Any]:
    hold = FollowedLife._hold

    def held(self: FollowedLife, entry: IndexEntry) -> Any:
        self.max_held_records = 4
        return hold(self, entry)

    return held
