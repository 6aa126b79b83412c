"""Two Ray clusters on one Redis, as in an incremental upgrade: each has its routers and workers, both see all.

The old version's prompts are hashed by another RouteScheme than the new one's. Traffic moves in shares.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

from fake_index_store import FakeStore
from fake_routing import CHUNK, RoutingWorld
from virtual_loop import VirtualLoop

from cluster.config import IndexConfig
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash, RouteScheme, hash_prompt, root_hash
from cluster.core.replica import Epoch, ReplicaInfo, ReplicaLoad, WorkerId
from cluster.index.follower import IndexFollower
from router.routing_state import RouteHint

CONFIG = IndexConfig(heartbeat_s=0.05, heartbeat_ttl_s=0.4)
TOPICS, PROMPT_CHUNKS = 6, 10


class Version:
    """A cluster: one router, and workers that remember the chunks of what they were sent."""

    def __init__(self, name: str, store: FakeStore, workers: int, max_model_len: int = 4096) -> None:
        clock = asyncio.get_running_loop().time
        self.scheme = RouteScheme(tokenizer_revision="t", model_revision=name, chunk_tokens=CHUNK)
        self.workers = [WorkerId(f"{name}-{number}") for number in range(workers)]
        self.world = RoutingWorld(f"router-{name}", clock=clock)
        self.follower = self.world.state.follower = IndexFollower(
            store, self.world.index, CONFIG, self.scheme.digest, clock
        )
        self.store = store
        self.epochs: dict[WorkerId, Epoch] = {}
        self.seqs: Counter[WorkerId] = Counter()
        self.held: dict[WorkerId, set[ChunkHash]] = {worker_id: set() for worker_id in self.workers}
        self.max_model_len = max_model_len
        self.reused = self.wrongly_promised = self.asked = 0

    async def start(self) -> None:
        for worker_id in self.workers:
            info = ReplicaInfo(
                worker_id=worker_id,
                route_digest=self.scheme.digest,
                kv_fingerprint=self.scheme.model_revision,
                block_size=CHUNK,
                chunk_tokens=CHUNK,
                num_blocks=64,
                max_model_len=self.max_model_len,
                model="demo",
            )
            self.epochs[worker_id] = await self.store.register(info)
            await self.store.heartbeat(worker_id, self.epochs[worker_id], ReplicaLoad())
        await self.follower.start()
        assert await self.follower.wait_ready(5)
        self.world.state.keep_only(self.workers)

    async def ask(self, topic: int, request_id: str) -> None:
        """One request through this cluster's router; Serve offers it this cluster's workers only."""
        tokens = [1000 * topic + place for place in range(PROMPT_CHUNKS * CHUNK)]
        chunks = tuple(hash_prompt(root_hash(self.scheme), tokens, CHUNK))
        hint = RouteHint(request_id=request_id, chunk_hashes=chunks, prompt_tokens=len(tokens))
        chosen = self.world.decide(hint, *self.workers)[0]
        held = self.held[chosen]
        cached = next((n for n, chunk in enumerate(chunks) if chunk not in held), len(chunks)) * CHUNK
        promised = self.world.seen[chosen].overlap_tokens
        self.asked += 1
        self.reused += cached > 0
        self.wrongly_promised += promised > cached
        self.world.state.answered(request_id, min(cached, len(tokens) - 1))
        self.world.state.release(request_id)
        new = [chunk for chunk in chunks if chunk not in held]
        if new:
            held.update(new)
            self.seqs[chosen] += 1
            event = CacheEvent(CacheEventKind.STORED, tuple(new))
            await self.store.publish(chosen, self.epochs[chosen], self.seqs[chosen], [event])

    async def beat(self) -> None:
        for worker_id, epoch in self.epochs.items():
            await self.store.heartbeat(worker_id, epoch, ReplicaLoad())

    async def leave(self) -> None:
        """Its last stream has ended: the workers take themselves out."""
        for worker_id, epoch in self.epochs.items():
            assert await self.store.deregister(worker_id, epoch)
        self.epochs.clear()


class Upgrade:
    def __init__(self) -> None:
        self.store = FakeStore(asyncio.get_running_loop().time, ttl_s=CONFIG.heartbeat_ttl_s)
        self.old = Version("old", self.store, workers=3)
        self.new = Version("new", self.store, workers=2, max_model_len=8192)
        self.rng = random.Random(7)
        self._numbers = 0

    async def traffic(self, new_share: float, requests: int) -> None:
        for _ in range(requests):
            self._numbers += 1
            version = self.new if self.rng.random() < new_share else self.old
            await version.ask(self.rng.randrange(TOPICS), f"r{self._numbers}")
            await self.old.beat()
            await self.new.beat()
            await asyncio.sleep(CONFIG.heartbeat_s)


def in_virtual_time(test: Callable[[Upgrade], Awaitable[None]]) -> None:
    async def run() -> None:
        upgrade = Upgrade()
        try:
            await test(upgrade)
        finally:
            await upgrade.old.follower.close()
            await upgrade.new.follower.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


def test_traffic_moves_without_a_wrong_hit_and_the_old_version_leaves() -> None:
    async def scenario(upgrade: Upgrade) -> None:
        old, new = upgrade.old, upgrade.new
        await old.start()
        await upgrade.traffic(0.0, 4 * TOPICS)
        assert old.reused >= 3 * TOPICS
        await new.start()
        for share in (0.1, 0.5, 0.9, 1.0):
            await upgrade.traffic(share, 40)
        assert old.wrongly_promised == new.wrongly_promised == 0
        assert new.reused >= new.asked - len(new.workers) * TOPICS > 0
        for version, other in ((old, new), (new, old)):
            rows = {row.worker_id: row for row in version.world.state.index_status().workers}
            assert all(rows[worker_id].same_scheme for worker_id in version.workers)
            assert not any(rows[worker_id].same_scheme or rows[worker_id].chunks for worker_id in other.workers)
        await old.leave()
        await upgrade.traffic(1.0, 10)
        assert set(new.follower.workers) == set(new.workers)
        assert upgrade.store.records.keys() == set(new.workers)

    in_virtual_time(scenario)


def test_a_router_speaks_for_the_workers_of_its_own_cluster_only() -> None:
    """Neither the other version's limit nor its workers are its own, and with none of its own it is not ready."""

    async def scenario(upgrade: Upgrade) -> None:
        old, new = upgrade.old, upgrade.new
        await old.start()
        workers, new.workers = new.workers, []
        await new.start()  # its routers are up before its workers
        assert not new.world.state.ready()
        new.workers = workers
        await new.start()
        await upgrade.traffic(0.5, 4)
        assert new.world.state.ready()
        assert new.world.state.max_model_len() == 8192
        assert {row.info.worker_id for row in new.world.state.replicas()} == set(workers)
        assert old.world.state.max_model_len() == 4096

    in_virtual_time(scenario)
