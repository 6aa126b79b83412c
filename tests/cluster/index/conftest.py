"""Fixtures of the index tests: values, the in-memory stand-in for the shared index, and a private Redis server.

Owns: the fixtures.
Does not: test anything.
Invariants: every test has its own keys; the server ends with the session.
"""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from fake_index_store import FakeStore

from cluster.config import IndexConfig
from cluster.core.hashing import ChunkHash, RouteScheme, hash_prompt, root_hash
from cluster.core.replica import ReplicaInfo, WorkerId
from cluster.index.private_server import PrivateRedis, find_server
from cluster.index.redis_reader import RedisReader
from cluster.index.redis_writer import RedisWriter

DIGEST = "the-route-digest"


@pytest.fixture
def fake_store() -> FakeStore:
    return FakeStore()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[PrivateRedis]:
    with PrivateRedis() as server:
        yield server


@pytest.fixture(scope="session", params=["wheel", "redis-server"])
def server_program(request: pytest.FixtureRequest) -> Path:
    """The server of the wheel, and Redis itself where it is installed."""
    if request.param == "wheel":
        return find_server(path="/nonexistent")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server on PATH: only the wheel's server is tested")
    return Path(program)


@pytest.fixture
def index_config() -> IndexConfig:
    return IndexConfig(
        key_prefix=f"test-{uuid.uuid4().hex}",
        heartbeat_s=0.05,
        heartbeat_ttl_s=0.4,
        publish_interval_s=0.01,
        timeout_s=5.0,  # a loaded machine stops everybody for a second now and then
    )


@pytest.fixture
async def redis_writer(redis_server: PrivateRedis, index_config: IndexConfig) -> AsyncIterator[RedisWriter]:
    writer = RedisWriter.open(index_config, redis_server.url, "org/model {1}")
    yield writer
    await writer.close()


@pytest.fixture
async def redis_reader(redis_server: PrivateRedis, index_config: IndexConfig) -> AsyncIterator[RedisReader]:
    reader = RedisReader.open(index_config, redis_server.url, "org/model {1}")
    yield reader
    await reader.close()


@pytest.fixture
def make_info() -> Callable[..., ReplicaInfo]:
    def make(worker_id: str, route_digest: str = DIGEST) -> ReplicaInfo:
        return ReplicaInfo(
            worker_id=WorkerId(worker_id),
            route_digest=route_digest,
            kv_fingerprint="fp",
            block_size=16,
            chunk_tokens=64,
            num_blocks=1024,
            max_model_len=4096,
            model="org/model {1}",
        )

    return make


@pytest.fixture
def chain() -> Callable[..., list[ChunkHash]]:
    """`chain(5)`: the hashes of a prompt of 5 chunks; another `salt` gives unrelated ones."""

    def make(num_chunks: int, salt: str = "") -> list[ChunkHash]:
        scheme = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=1, salt=salt)
        return hash_prompt(root_hash(scheme), range(num_chunks), 1)

    return make


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    async def wait(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "what was waited for did not happen"
            await asyncio.sleep(0.005)

    return wait
