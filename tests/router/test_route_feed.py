"""RoutingState behind a real IndexFollower: two route schemes in one fleet, and a Redis that goes and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fake_index_store import FakeStore
from fake_routing import CHUNK, A, B, RoutingWorld, chunks, hint
from virtual_loop import VirtualLoop

from cluster.config import IndexConfig
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.replica import Epoch, ReplicaInfo, ReplicaLoad, WorkerId
from cluster.index.follower import IndexFollower
from cluster.index.known import FollowerState

CONFIG = IndexConfig(heartbeat_s=0.05, heartbeat_ttl_s=0.4)
DIGEST = "scheme-1"


class Feed:
    """A router that follows a FakeStore, in the virtual time of its event loop."""

    def __init__(self) -> None:
        clock = asyncio.get_running_loop().time
        self.store = FakeStore(clock, ttl_s=CONFIG.heartbeat_ttl_s)
        self.world = RoutingWorld(clock=clock)
        self.follower = self.world.state.follower = IndexFollower(self.store, self.world.index, CONFIG, DIGEST, clock)
        self.beating: dict[WorkerId, Epoch] = {}

    async def join(
        self, worker_id: WorkerId, held: int = 0, digest: str = DIGEST, incarnation: str = "p", after: int = 0
    ) -> Epoch:
        info = ReplicaInfo(
            worker_id=worker_id,
            route_digest=digest,
            kv_fingerprint="f",
            block_size=CHUNK,
            chunk_tokens=CHUNK,
            num_blocks=64,
            max_model_len=4096,
            model="demo",
            incarnation=incarnation,
        )
        epoch = self.beating[worker_id] = await self.store.register(info, Epoch(after))
        await self.store.publish(worker_id, epoch, 1, [CacheEvent(CacheEventKind.STORED, chunks(held))])
        await self.store.heartbeat(worker_id, epoch, ReplicaLoad())
        return epoch

    async def pass_time(self, seconds: float) -> None:
        """All who still beat do so meanwhile."""
        for _ in range(round(seconds / CONFIG.heartbeat_s)):
            for worker_id, epoch in self.beating.items():
                if worker_id in self.store.records and not self.store.down:
                    await self.store.heartbeat(worker_id, epoch, ReplicaLoad())
            await asyncio.sleep(CONFIG.heartbeat_s)

    async def start(self) -> None:
        await self.follower.start()
        assert await self.follower.wait_ready(5)


def in_virtual_time(test: Callable[[Feed], Awaitable[None]]) -> None:
    async def run() -> None:
        feed = Feed()
        try:
            await test(feed)
        finally:
            await feed.follower.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


def test_in_a_fleet_of_two_route_schemes_the_other_one_is_chosen_by_load_only() -> None:
    """What a worker with another scheme says it holds are other texts, even where the bytes of the hashes agree."""

    async def scenario(feed: Feed) -> None:
        world = feed.world
        await feed.join(A, held=4)
        await feed.join(B, held=10, digest="scheme-2")
        await feed.start()
        assert world.decide(hint("r1"), A, B) == [A, B]
        assert (world.seen[A].overlap_tokens, world.seen[B].overlap_tokens) == (4 * CHUNK, 0)
        world.state.work.book("busy", A, 1.0, 2000, 1000, world.state.clock())
        assert world.decide(hint("r2"), A, B) == [B, A]  # it does serve, and what it gets attracts nobody
        world.state.answered("r2", 0)
        world.decide(hint("r3"), A, B)
        assert world.seen[B].overlap_tokens == 0
        status = world.state.index_status()
        rows = {row.worker_id: row for row in status.workers}
        assert (rows[A].affinity, rows[A].same_scheme, rows[A].chunks) == (True, True, 4)
        assert (rows[B].affinity, rows[B].same_scheme, rows[B].chunks) == (False, False, 0)
        assert status.metrics["kvray_index_feed_scheme_mismatches"] == 1
        assert status.metrics["kvray_index_load_only_workers"] == 1
        assert status.metrics["kvray_index_speculative_entries"] == 1  # r1, on A
        assert status.metrics["kvray_parity_checks"] == 0  # nothing was promised, so nothing was missed

    in_virtual_time(scenario)


def test_running_requests_stay_counted_when_redis_comes_back_empty() -> None:
    """The worker registers anew and runs on: what it still has to do is ahead of the next request, once."""

    async def scenario(feed: Feed) -> None:
        world = feed.world
        first = await feed.join(A, held=2)
        await feed.start()
        world.decide(hint("long"), A)
        expected = 40 - 2 * CHUNK
        feed.store.load()
        await feed.pass_time(0.2)
        second = await feed.join(A, held=2, after=first)
        await feed.pass_time(0.2)
        assert world.state.epoch_of(A) == second > first
        world.decide(hint("next"), A)
        assert (world.seen[A].ahead_tokens, world.seen[A].running) == (expected, 1)
        assert world.seen[A].overlap_tokens == 39  # the first is still being prefilled there
        assert (world.ledger.uncached_tokens(A, first), world.ledger.requests(A, first)) == (0, 0)
        for request_id in ("long", "next"):
            world.state.answered(request_id, 0)
            world.state.release(request_id)
        assert len(world.ledger) == 0
        assert world.ledger.uncached_tokens(A, second) == 0

    in_virtual_time(scenario)


def test_a_process_that_was_started_again_begins_without_load() -> None:
    async def scenario(feed: Feed) -> None:
        world = feed.world
        first = await feed.join(A, incarnation="p")
        await feed.start()
        world.decide(hint("long"), A)
        second = await feed.join(A, incarnation="q", after=first)
        await feed.pass_time(0.2)
        assert world.state.epoch_of(A) == second
        world.decide(hint("next"), A)
        assert (world.seen[A].ahead_tokens, world.seen[A].overlap_tokens) == (0, 0)
        world.state.answered("long", None)
        world.state.release("long")  # its call broke: nothing of the new life changes
        assert (world.ledger.uncached_tokens(A, second), world.ledger.requests(A, second)) == (40, 1)

    in_virtual_time(scenario)


def test_a_worker_that_falls_silent_keeps_its_load_and_loses_its_affinity() -> None:
    async def scenario(feed: Feed) -> None:
        world = feed.world
        await feed.join(A, held=8)
        await feed.start()
        world.decide(hint("long"), A)
        epoch = feed.beating.pop(A)
        await feed.pass_time(1)
        assert A not in feed.follower.workers
        world.decide(hint("next"), A)
        assert (world.seen[A].ahead_tokens, world.seen[A].overlap_tokens) == (40 - 8 * CHUNK, 0)
        await feed.store.heartbeat(A, epoch, ReplicaLoad())
        feed.beating[A] = epoch
        await feed.pass_time(0.2)
        world.decide(hint("third"), A)
        assert world.seen[A].ahead_tokens == 40 - 8 * CHUNK + 40
        assert world.seen[A].overlap_tokens == 39

    in_virtual_time(scenario)


def test_the_state_of_the_feed_is_told() -> None:
    async def scenario(feed: Feed) -> None:
        assert feed.world.state.index_status().state is FollowerState.COLD
        await feed.join(A, held=3)
        await feed.start()
        await feed.pass_time(0.2)
        status = feed.world.state.index_status()
        assert (status.state, status.router_id) == (FollowerState.FOLLOWING, "me")
        assert 0 <= status.workers[0].load_age_s < 2 * CONFIG.heartbeat_s
        feed.store.down = True
        await feed.pass_time(2)
        assert feed.world.decide(hint("r"), A) == [A]
        assert feed.world.seen[A].overlap_tokens == 3 * CHUNK  # on what is known
        status = feed.world.state.index_status()
        assert status.state is FollowerState.UNREACHABLE
        assert status.workers[0].load_age_s > 1
        assert status.metrics["kvray_index_lookups"] == 1
        assert {"kvray_index_feed_applied", "kvray_index_speculative_entries"} <= status.metrics.keys()

    in_virtual_time(scenario)
