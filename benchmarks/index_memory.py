"""What the index costs in Redis, and how long a router's loop is held up while it reads.

`python -m benchmarks.index_memory` starts a private server of its own (or `--program`), fills it with one worker's
chunks, and prints bytes per chunk, per stream entry and per worker, the time to read everything into a router's index,
and the longest turn of its loop meanwhile.

Owns: the measurement.
Does not: judge it (docs/index_memory.md has the figures and the formula).
Invariants: the server ends with the program.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path

from cluster.config import IndexConfig
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import ReplicaInfo, ReplicaLoad, WorkerId
from cluster.index.follower import IndexFollower
from cluster.index.keys import IndexKeys
from cluster.index.memory import MemoryIndex
from cluster.index.private_server import PrivateRedis
from cluster.index.redis_client import connect
from cluster.index.redis_reader import RedisReader
from cluster.index.redis_writer import RedisWriter

WORKER = WorkerId("a-worker-id-as-long-as-serve-makes-them")
INFO = ReplicaInfo(
    worker_id=WORKER,
    route_digest="d" * 32,
    kv_fingerprint="f" * 32,
    block_size=16,
    chunk_tokens=64,
    num_blocks=4096,
    max_model_len=8192,
    model="m",
)


async def measure(chunks: int, program: Path | None) -> None:
    with PrivateRedis(program=program) as server:
        config = IndexConfig(stream_max_entries=1_000_000, heartbeat_ttl_s=60)
        client = connect(server.url, 60)
        writer, reader = RedisWriter.open(config, server.url, "m"), RedisReader.open(config, server.url, "m")
        keys = IndexKeys(prefix=config.key_prefix, model="m")
        rng = random.Random(0)

        async def used() -> int:
            return int((await client.info("memory"))["used_memory"])

        epoch = await writer.register(INFO)
        load = ReplicaLoad(uncached_tokens={f"router-{n}": 1000 for n in range(4)})
        await writer.heartbeat(WORKER, epoch, load)
        own = [await client.memory_usage(key, samples=0) or 0 for key in (keys.worker(WORKER), keys.beat(WORKER))]
        print(f"a worker without chunks: {sum(own)} bytes (hash {own[0]}, heartbeat {own[1]})")
        seq = 0
        for batch in (1, 16, 256, 1024):
            before = await used()
            entries = 1000 if batch < 256 else 200
            for _ in range(entries):
                seq += 1
                hashes = tuple(ChunkHash(rng.randbytes(16)) for _ in range(batch))
                events = [CacheEvent(CacheEventKind.STORED, hashes), CacheEvent(CacheEventKind.REMOVED, hashes[::-1])]
                await writer.publish(WORKER, epoch, seq, events[: 1 if batch > 512 else 2])
                if batch > 512:
                    await client.delete(keys.chunks(WORKER))
            carried = batch * (1 if batch > 512 else 2)
            print(f"an entry with {carried} hashes: {(await used() - before) / entries:.0f} bytes in the stream")
        await client.delete(keys.events)
        for target in (100, 1000, 10_000, 100_000, chunks):
            await client.delete(keys.chunks(WORKER))
            for start in range(0, target, 2000):
                hashes_ = [rng.randbytes(16) for _ in range(min(2000, target - start))]
                await client.sadd(keys.chunks(WORKER), *hashes_)
            by_usage = await client.memory_usage(keys.chunks(WORKER), samples=0) or 0
            print(f"a set of {target} chunks: {by_usage / target:.1f} bytes per chunk")
        await client.persist(keys.worker(WORKER))
        await let_a_router_read(reader, config)
        await watch_a_router_read(reader, config)
        await writer.close()
        await reader.close()
        await client.aclose()


async def let_a_router_read(reader: RedisReader, config: IndexConfig) -> None:
    index = MemoryIndex()
    follower = IndexFollower(reader, index, config, INFO.route_digest)
    started, cpu = time.perf_counter(), time.thread_time()
    await follower.start()
    await follower.wait_ready(600)
    taken, cpu = time.perf_counter() - started, time.thread_time() - cpu
    print(f"a router read {index.chunk_count(WORKER)} chunks in {taken:.1f} s, {cpu:.1f} s of its own CPU")
    await follower.close()


async def watch_a_router_read(reader: RedisReader, config: IndexConfig) -> None:
    index = MemoryIndex()
    follower = IndexFollower(reader, index, config, INFO.route_digest)
    slices: list[float] = []
    walls: list[float] = []
    started = time.perf_counter()
    await follower.start()
    last, wall = time.thread_time(), time.perf_counter()
    while not follower.ready:
        await asyncio.sleep(0)
        now, now_wall = time.thread_time(), time.perf_counter()
        slices.append(now - last)
        walls.append(now_wall - wall)
        last, wall = now, now_wall
    taken = time.perf_counter() - started
    print(
        f"the same with its loop watched ({taken:.1f} s): the longest turn took "
        f"{1000 * max(slices):.1f} ms of CPU ({sum(s > 0.005 for s in slices)} of {len(slices)} over 5 ms), "
        f"{1000 * max(walls):.1f} ms by the wall"
    )
    await follower.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--program", type=Path, help="a server program (default: from PATH, else the wheel's)")
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.chunks, arguments.program))


if __name__ == "__main__":
    main()
