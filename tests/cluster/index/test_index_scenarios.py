"""What goes wrong in other systems' indexes, here against a real server and real processes: each ends in the truth."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from cluster.config import IndexConfig
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash, RouteScheme, hash_prompt, root_hash
from cluster.core.replica import Epoch, ReplicaInfo, WorkerId
from cluster.index.base import Snapshot
from cluster.index.follower import FollowerState, IndexFollower
from cluster.index.keys import IndexKeys
from cluster.index.memory import MemoryIndex
from cluster.index.private_server import PrivateRedis
from cluster.index.redis_client import connect
from cluster.index.redis_reader import RedisReader
from cluster.index.redis_writer import RedisWriter
from cluster.index.wire import encode_entry
from worker.cache_reporter import CacheReporter

pytestmark = pytest.mark.redis

MODEL = "org/model {1}"
A, B = WorkerId("a"), WorkerId("b")
CLEARED = CacheEvent(CacheEventKind.CLEARED)
MakeInfo = Callable[..., ReplicaInfo]
Chain = Callable[..., list[ChunkHash]]
Eventually = Callable[..., Awaitable[None]]

WORKER_PROCESS = """
import asyncio, json, sys
from cluster.config import IndexConfig
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import ReplicaInfo
from cluster.index.redis_writer import RedisWriter
from worker.cache_reporter import CacheReporter

async def main(config, url, info, chunks):
    config = IndexConfig(**config)
    reporter = CacheReporter(RedisWriter.open(config, url, info["model"]), ReplicaInfo(**info), config)
    await reporter.start()
    hashes = tuple(ChunkHash(bytes.fromhex(chunk)) for chunk in chunks)
    reporter.record([CacheEvent(CacheEventKind.STORED, hashes)])
    while reporter.pending_chunks or not reporter.seq:
        await asyncio.sleep(0.005)
    print(reporter.epoch, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*json.loads(sys.stdin.readline())))
"""


def stored(*chunks: ChunkHash) -> CacheEvent:
    return CacheEvent(CacheEventKind.STORED, chunks)


def removed(*chunks: ChunkHash) -> CacheEvent:
    return CacheEvent(CacheEventKind.REMOVED, chunks)


class World:
    """One server with routers and workers around it."""

    def __init__(self, server: PrivateRedis, config: IndexConfig, make_info: MakeInfo) -> None:
        self.url = server.url
        self.config = config
        self.keys = IndexKeys(prefix=config.key_prefix, model=MODEL)
        self.client: Redis = connect(server.url, 1.0)
        self.reporters: dict[WorkerId, CacheReporter] = {}
        self._make_info = make_info
        self._routers: list[IndexFollower] = []
        self._ends: list[Callable[[], Awaitable[None]]] = [self.client.aclose]

    async def router(self, model: str = MODEL) -> tuple[IndexFollower, MemoryIndex]:
        reader = RedisReader.open(self.config, self.url, model)
        index = MemoryIndex()
        follower = IndexFollower(reader, index, self.config, "the-route-digest")
        await follower.start()
        self._routers.append(follower)
        self._ends += [reader.close, follower.close]
        return follower, index

    async def worker(self, name: str, *held: ChunkHash, model: str = MODEL) -> CacheReporter:
        writer = RedisWriter.open(self.config, self.url, model)
        reporter = CacheReporter(writer, self._make_info(name), self.config)
        reporter.record([stored(*held)])
        await reporter.start()
        self.reporters[WorkerId(name)] = reporter
        self._ends += [writer.close, reporter.close]
        return reporter

    async def close(self) -> None:
        for end in reversed(self._ends):
            await end()


@pytest.fixture
def server(server_program: Path) -> Iterator[PrivateRedis]:
    with PrivateRedis(program=server_program) as server:
        yield server


@pytest.fixture
async def world(server: PrivateRedis, index_config: IndexConfig, make_info: MakeInfo) -> AsyncIterator[World]:
    world = World(server, index_config, make_info)
    yield world
    await world.close()


def holds(index: MemoryIndex, prompt: list[ChunkHash], **expected: int) -> Callable[[], bool]:
    return lambda: index.overlaps(prompt) == expected


async def within(seconds: float, condition: Callable[[], bool]) -> None:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds} s"
        await asyncio.sleep(0.005)


# --- processes --------------------------------------------------------------------------------------------------


def start_worker_process(world: World, info: ReplicaInfo, chunks: list[ChunkHash]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER_PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert process.stdin is not None
    line = [world.config.model_dump(), world.url, info.to_wire(), [chunk.hex() for chunk in chunks]]
    process.stdin.write(json.dumps(line) + "\n")
    process.stdin.flush()
    return process


async def test_a_killed_worker_process_and_its_replacement_of_the_same_id(
    world: World, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    """Scenario 14: after kill -9 and a restart under the same id nothing credits the old cache."""
    old, new = chain(50, "old"), chain(30, "new")
    _, index = await world.router()
    first = start_worker_process(world, make_info("a"), old)
    second: subprocess.Popen[str] | None = None
    try:
        await eventually(holds(index, old, a=50))
        first.send_signal(signal.SIGKILL)
        first.wait()
        second = start_worker_process(world, make_info("a"), new)
        assert second.stdout is not None
        new_epoch = int(await asyncio.to_thread(second.stdout.readline))
        await eventually(holds(index, new, a=30))
        assert index.overlaps(old) == {}
        assert index.live() == {A: new_epoch}
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.communicate()


async def test_a_killed_worker_process_is_gone_after_one_ttl(
    world: World, make_info: MakeInfo, chain: Chain, eventually: Eventually
) -> None:
    """Scenario 14: without a replacement the heartbeat's end is the end."""
    prompt = chain(20)
    follower, index = await world.router()
    process = start_worker_process(world, make_info("a"), prompt)
    try:
        await eventually(holds(index, prompt, a=20))
    finally:
        process.kill()
        process.communicate()
    await within(world.config.heartbeat_ttl_s + 2.0, lambda: A not in follower.workers)
    assert index.overlaps(prompt) == {}


# --- the stream -------------------------------------------------------------------------------------------------


async def tamper(world: World, rng: random.Random, epoch: Epoch | None, chunks: list[ChunkHash]) -> None:
    """Drop, repeat, reorder or corrupt the newest entries, perhaps before the routers read them, or add a stranger."""
    events, client = world.keys.events, world.client
    last: Any = await client.xrevrange(events, count=3)
    if not last:
        return
    kind = rng.choice(["drop", "repeat", "reorder", "corrupt", "stranger"])
    if kind in ("drop", "corrupt"):
        await client.xdel(events, last[0][0])
    if kind == "repeat":
        await client.xadd(events, rng.choice(last)[1])
    elif kind == "reorder":
        await client.xdel(events, *(entry_id for entry_id, _ in last))
        for _, values in last:
            await client.xadd(events, values)
    elif kind == "corrupt":
        payload = bytearray(last[0][1][b"entry"])
        payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
        await client.xadd(events, {"entry": bytes(payload)})
    elif kind == "stranger":
        seq = rng.choice([0, 1, 10**9])
        await client.xadd(events, {"entry": encode_entry(A, epoch or Epoch(1), seq, [stored(*chunks)])})


def all_equal(world: World, routers: list[tuple[IndexFollower, MemoryIndex]], chunks: list[ChunkHash]) -> bool:
    """Every router's index holds what every cache holds, and says so."""
    return all(
        {chunk for chunk in chunks if index.overlaps([chunk]).get(worker_id)} == set(reporter.chunks)
        and worker_id in follower.workers
        and follower.workers[worker_id].in_step
        for follower, index in routers
        for worker_id, reporter in world.reporters.items()
    )


async def test_dropped_repeated_reordered_and_corrupted_entries_in_the_real_stream(
    world: World, chain: Chain, eventually: Eventually
) -> None:
    """Scenarios 16 and 17: whatever happens to entries of the stream, every index ends equal to the caches."""
    rng = random.Random(3)
    prompts = [chain(12, str(number)) for number in range(6)]
    every = [chunk for prompt in prompts for chunk in prompt]
    workers = [await world.worker(name) for name in ("a", "b")]
    routers = [await world.router() for _ in range(2)]
    for _ in range(60):
        for reporter in workers:
            prompt = rng.choice(prompts)
            depth = rng.randint(1, len(prompt))
            reporter.record([stored(*prompt[:depth])])
            if rng.random() < 0.4:
                reporter.record([removed(*reversed(prompt[depth // 2 :]))])
            if rng.random() < 0.05:
                reporter.record([CLEARED])
        await asyncio.sleep(rng.choice([0, 0.01, 0.02]))
        await tamper(world, rng, workers[0].epoch, every)
    await eventually(lambda: all_equal(world, routers, every))
    assert sum(follower.counters.repaired for follower, _ in routers) > 0
    assert sum(follower.counters.bad for follower, _ in routers) > 0
    for _, index in routers:
        index.check_invariants()


async def test_other_workers_are_followed_while_a_snapshot_is_read(
    world: World, chain: Chain, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario 17: a repair holds back the events of its own worker only, and credits it with nothing meanwhile."""
    prompt, other = chain(40), chain(8, "other")
    a, b = await world.worker("a", *prompt), await world.worker("b")
    follower, index = await world.router()
    await eventually(holds(index, prompt, a=40))
    go_on, asked = asyncio.Event(), asyncio.Event()
    read = RedisReader.snapshot

    async def slow(self: RedisReader, worker_id: WorkerId) -> Snapshot | None:
        snapshot = await read(self, worker_id)
        asked.set()
        await go_on.wait()
        return snapshot

    monkeypatch.setattr(RedisReader, "snapshot", slow)
    await world.client.xadd(world.keys.events, {"entry": encode_entry(A, a.epoch or Epoch(0), 50, [])})  # a gap
    await asyncio.wait_for(asked.wait(), 5)
    b.record([stored(*other)])
    a.record([removed(prompt[39])])
    await eventually(holds(index, other, b=8))
    assert not follower.workers[A].in_step
    assert follower.workers[B].in_step
    go_on.set()
    await eventually(lambda: follower.workers[A].in_step and index.overlaps(prompt) == {"a": 39})


async def test_several_models_in_one_server_never_mix(world: World, chain: Chain, eventually: Eventually) -> None:
    """Scenario 11: the same worker id under two models is two workers."""
    prompt = chain(6)
    await world.worker("a", *prompt[:2], model="one")
    await world.worker("a", *prompt[:5], model="one}")
    (_, one), (_, two) = await world.router("one"), await world.router("one}")
    await eventually(holds(one, prompt, a=2))
    await eventually(holds(two, prompt, a=5))


# --- routers ----------------------------------------------------------------------------------------------------


async def test_a_restarted_router_has_full_affinity_within_two_seconds(
    world: World, chain: Chain, eventually: Eventually
) -> None:
    """Scenario 19: load only before the snapshot is in, all of it after, however long ago the events were."""
    prompt = chain(20_000)
    for name in ("a", "b"):
        await world.worker(name, *prompt)
    before, index = await world.router()
    await eventually(holds(index, prompt, a=20_000, b=20_000))
    await before.close()
    await world.client.xtrim(world.keys.events, maxlen=0)
    follower, index = await world.router()
    assert not follower.ready
    assert follower.state == "cold"
    await within(2.0, lambda: follower.ready)
    assert index.overlaps(prompt) == {A: 20_000, B: 20_000}
    assert all(known.in_step for known in follower.workers.values())
    assert follower.state is FollowerState.FOLLOWING


# --- Redis away -------------------------------------------------------------------------------------------------


async def test_a_stopped_redis_raises_nothing_and_catches_up(
    server: PrivateRedis, world: World, chain: Chain, eventually: Eventually
) -> None:
    """SIGSTOP: the server is there but does not answer; the caches go on changing."""
    prompt = chain(400)
    reporter = await world.worker("a", *prompt[:100])
    follower, index = await world.router()
    await eventually(holds(index, prompt, a=100))
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        for number in range(100, 300):
            reporter.record([stored(prompt[number])])
            await asyncio.sleep(0)
        await eventually(lambda: follower.state is FollowerState.UNREACHABLE)
        reporter.record([stored(*prompt[300:]), removed(*reversed(prompt[200:]))])
        assert index.overlaps(prompt) == {A: 100}
        assert follower.workers[A].in_step
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await eventually(holds(index, prompt, a=200))
    await eventually(lambda: follower.state is FollowerState.FOLLOWING)
    reporter.record([stored(*prompt[200:])])
    await eventually(holds(index, prompt, a=400))


async def test_a_killed_redis_that_comes_back_empty_is_complete_within_three_seconds(
    server: PrivateRedis, server_program: Path, world: World, chain: Chain, eventually: Eventually
) -> None:
    prompt = chain(5000)
    reporters = [await world.worker(name, *prompt[:4000]) for name in ("a", "b")]
    follower, index = await world.router()
    await eventually(holds(index, prompt, a=4000, b=4000))
    assert server.pid is not None
    port = server.port
    os.kill(server.pid, signal.SIGKILL)
    await eventually(lambda: follower.state is FollowerState.UNREACHABLE)
    for reporter in reporters:
        reporter.record([stored(*prompt[4000:])])
    assert index.overlaps(prompt) == {A: 4000, B: 4000}
    await asyncio.to_thread(server.stop)
    with PrivateRedis(program=server_program, port=port):
        await within(
            3.0,
            lambda: (
                index.overlaps(prompt) == {A: 5000, B: 5000}
                and follower.state is FollowerState.FOLLOWING
                and all(known.in_step for known in follower.workers.values())
            ),
        )
        await world.close()
        world._ends.clear()


async def test_a_server_that_is_behind_takes_over_and_workers_publish_under_new_epochs(
    world: World, chain: Chain, eventually: Eventually
) -> None:
    """A replica that lags is promoted: its sets are old, and its epochs, and one worker has nothing new to say."""
    prompt, extra = chain(300), chain(5, "extra")
    busy, idle = await world.worker("a", *prompt[:100]), await world.worker("b", *prompt[:100])
    follower, index = await world.router()
    await eventually(holds(index, prompt, a=100, b=100))
    epochs = {worker_id: follower.workers[worker_id].epoch for worker_id in (A, B)}
    names = await world.client.keys("*")
    old: dict[Any, Any] = {name: (await world.client.pttl(name), await world.client.dump(name)) for name in names}
    for reporter in (busy, idle):
        reporter.record([stored(*prompt[100:200])])
    await eventually(holds(index, prompt, a=200, b=200))
    async with world.client.pipeline(transaction=True) as swap:
        swap.flushall()
        for name, (ttl, dumped) in old.items():
            swap.restore(name, max(0, ttl), dumped)
        await swap.execute()
    busy.record([stored(*prompt[200:], *extra)])
    await eventually(lambda: all((world.reporters[w].epoch or 0) > epochs[w] for w in (A, B)))
    await eventually(holds(index, prompt, a=300, b=200))
    _, fresh = await world.router()
    await eventually(holds(fresh, prompt, a=300, b=200))
    await eventually(holds(fresh, extra, a=5))


async def test_any_mix_of_trouble_on_a_real_server_ends_in_the_truth(
    world: World, make_info: MakeInfo, eventually: Eventually
) -> None:
    """The bounded real counterpart of test_index_convergence.py."""
    rng = random.Random(11)
    chunks = [ChunkHash(rng.randbytes(16)) for _ in range(64)]
    for name in ("a", "b", "c"):
        await world.worker(name)
    routers = [await world.router()]
    for step in range(120):
        worker_id = rng.choice(list(world.reporters))
        reporter = world.reporters[worker_id]
        reporter.record([stored(*rng.sample(chunks, 5)), removed(*rng.sample(chunks, 3))])
        trouble = rng.choice(["flush", "trim", "forget", "disconnect", "replace", "router", *[""] * 20])
        if trouble == "replace":
            await world.worker(str(worker_id), *rng.sample(chunks, 10))
            await reporter.close()
        elif trouble == "router" and len(routers) < 3:
            routers.append(await world.router())
        else:
            await harm(world, trouble, worker_id)
        if step % 3 == 0:
            await asyncio.sleep(0.01)
    await eventually(lambda: all_equal(world, routers, chunks))


async def harm(world: World, trouble: str, worker_id: WorkerId) -> None:
    if trouble == "flush":
        await world.client.flushall()
    elif trouble == "trim":
        await world.client.xtrim(world.keys.events, maxlen=0)
    elif trouble == "forget":
        await world.client.delete(world.keys.worker(worker_id))
    elif trouble == "disconnect":
        await world.client.client_kill_filter(_type="normal", skipme=True)


# --- namespaces -------------------------------------------------------------------------------------------------


def hashes_of(tokens: range, **scheme: object) -> list[ChunkHash]:
    fields = {"tokenizer_revision": "t", "model_revision": "m", "chunk_tokens": 64, **scheme}
    made = RouteScheme(**fields)  # type: ignore[arg-type]
    return hash_prompt(root_hash(made), tokens, made.chunk_tokens)


async def test_another_salt_or_adapter_never_counts_as_a_hit(world: World, eventually: Eventually) -> None:
    """Scenario 22: the same tokens under another salt or adapter, even with the same text, share nothing."""
    tokens = range(640)
    plain = hashes_of(tokens)
    await world.worker("a", *plain)
    await world.worker("b", *hashes_of(tokens, salt="x"))
    _, index = await world.router()
    await eventually(holds(index, plain, a=10))
    await eventually(holds(index, hashes_of(tokens, salt="x"), b=10))
    assert index.overlaps(hashes_of(tokens, adapter="x")) == {}
    assert index.overlaps(hashes_of(tokens, salt="y")) == {}


async def test_a_worker_with_another_block_size_or_scheme_is_routed_to_by_load_only(
    server: PrivateRedis, world: World, make_info: MakeInfo, eventually: Eventually
) -> None:
    """Scenarios 20 and 23: chunks of another size are no chunks of ours, and its digest says so at registration."""
    tokens = range(640)
    small = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=16)
    writer = RedisWriter.open(world.config, server.url, MODEL)
    reporter = CacheReporter(writer, make_info("odd", route_digest=small.digest), world.config)
    reporter.record([stored(*hashes_of(tokens, chunk_tokens=16))])
    await reporter.start()
    await world.worker("a", *hashes_of(tokens))
    follower, index = await world.router()
    await eventually(holds(index, hashes_of(tokens), a=10))
    await eventually(lambda: WorkerId("odd") in follower.workers)
    assert index.overlaps(hashes_of(tokens, chunk_tokens=16)) == {}
    known = follower.workers[WorkerId("odd")]
    assert (known.indexed, known.in_step) == (False, False)
    assert follower.counters.scheme_mismatches == 1
    await reporter.close()
    await writer.close()
