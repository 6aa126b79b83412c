"""What routing by prefix lives on fails under load: Redis hangs, Redis loses everything, the router process dies.

No request fails, and prompts find their holders again. Named y so that it runs after the tests that need a cluster
with nothing wrong, and before those that kill replicas.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, NamedTuple

import httpx2 as httpx
import process_tree
import pytest
import redis

from cluster.core.replica import WorkerId
from cluster.index.keys import IndexKeys
from cluster.rpc import inference_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.redis, pytest.mark.timeout(300)]

KEYS = IndexKeys(prefix="kvray", model="demo")
OUTAGE_S = 10.0
REGISTERED_AGAIN_S = 3.0
BLOCK_TOKENS = 16
CLIENTS = 3


class Life(NamedTuple):
    """What Redis holds of one replica."""

    epoch: int
    chunks: frozenset[bytes]


class Warm(NamedTuple):
    """A long prompt, the replica that holds it, and how much of it that replica reused when asked again."""

    prompt: str
    holder: str
    cached_tokens: int


class Server:
    """The cluster's private Redis, seen from outside."""

    def __init__(self, client: redis.Redis) -> None:
        self.client: Any = client  # its annotations allow for answers of every kind
        self.pid: int = self.client.info("server")["process_id"]

    def lives(self) -> dict[str, Life]:
        found = {}
        for member in self.client.smembers(KEYS.workers):
            worker_id = WorkerId(member.decode())
            epoch = self.client.hget(KEYS.worker(worker_id), "epoch")
            if epoch is not None:
                found[str(worker_id)] = Life(int(epoch), frozenset(self.client.smembers(KEYS.chunks(worker_id))))
        return found


class Clients:
    """Ask without a pause from several threads until the block ends; then none may have failed."""

    def __init__(self, cluster: Any, prompt: Callable[[int], str]) -> None:
        self._cluster = cluster
        self._prompt = prompt
        self._numbers = count()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask_on) for _ in range(CLIENTS)]
        self.answered = 0
        self.failures: list[Exception] = []

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self.failures == []

    def answer_more(self, requests: int) -> None:
        """Come back when so many more were answered."""
        wanted = self.answered + requests
        eventually(lambda: self.answered >= wanted or self.failures, f"{requests} more answers")
        assert self.failures == []

    def _ask_on(self) -> None:
        while not self._stop.is_set():
            try:
                reply = ask(self._cluster, self._prompt(next(self._numbers)))
                assert reply.token_ids
            except Exception as error:
                self.failures.append(error)
                return
            self.answered += 1


def eventually(condition: Callable[[], object], what: str, timeout_s: float = 30.0, poll_s: float = 0.05) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(poll_s)


def ask(cluster: Any, text: str) -> pb.GenerateResponse:
    call = pb.GenerateRequest(text=text, sampling=pb.SamplingOptions(temperature=0, max_tokens=4))
    reply: pb.GenerateResponse = cluster.stub().GenerateOnce(call, timeout=60)
    return reply


def long_prompt(topic: str) -> str:
    return " ".join(f"Entry {n} of the {topic} log: {n * 37 % 89} boxes went to dock {n % 7}." for n in range(18))


def short_prompt(number: int) -> str:
    """With its answer it fills no block, so the caches stay as they are."""
    return f"Say {number % 10}"


def warm_up(cluster: Any, topics: Sequence[str]) -> list[Warm]:
    """Long prompts that are held, and known to be held, by one replica each."""
    prompts = [long_prompt(topic) for topic in topics]
    with ThreadPoolExecutor(4) as pool:
        first = list(pool.map(lambda prompt: ask(cluster, prompt), prompts))
    assert all(reply.usage.cached_tokens < 64 for reply in first)
    again = [ask(cluster, prompt) for prompt in prompts]
    assert [reply.replica for reply in again] == [reply.replica for reply in first]
    for reply in again:
        assert reply.usage.cached_tokens >= reply.usage.prompt_tokens - BLOCK_TOKENS > 200
    return [Warm(p, r.replica, r.usage.cached_tokens) for p, r in zip(prompts, again, strict=True)]


def assert_affine(cluster: Any, warm: Sequence[Warm]) -> None:
    for prompt, holder, cached_tokens in warm:
        reply = ask(cluster, prompt)
        assert (reply.replica, reply.usage.cached_tokens) == (holder, cached_tokens)


def indexed(cluster: Any) -> dict[str, int]:
    """Chunks by replica in the router's index."""
    return {replica.worker_id: replica.indexed_chunks for replica in cluster.status().replicas}


def published(server: Server) -> dict[str, int]:
    """Chunks by replica in Redis."""
    return {worker_id: len(life.chunks) for worker_id, life in server.lives().items()}


def wait_until_followed(cluster: Any, server: Server) -> None:
    """The router's index is what Redis holds."""
    eventually(lambda: len(indexed(cluster)) == 2 and indexed(cluster) == published(server), "the index is followed")


@pytest.fixture(scope="module")
def server(cluster: Any) -> Iterator[Server]:
    def url() -> re.Match[str] | None:
        return re.search(r"Redis (redis://\S+)", cluster.log.read_text())

    eventually(url, "kvray serve says where its Redis is")
    found = url()
    assert found is not None
    with redis.Redis.from_url(found[1], socket_timeout=5) as client:
        server = Server(client)
        assert server.pid in process_tree.descendants(cluster.process.pid)
        yield server


def test_redis_hangs_for_ten_seconds(cluster: Any, server: Server) -> None:
    """Routing goes on with what was known; what the caches gained meanwhile is published afterwards."""
    cluster.settled()
    warm = warm_up(cluster, ["outage", "harbour", "depot"])
    shared = long_prompt("shared")

    def prompt(number: int) -> str:
        return f"{shared} Question {number}: where to?" if number % 4 == 0 else short_prompt(number)

    def said(line: str) -> int:
        return cluster.log.read_text().count(line)

    lost, back = "routing on what is known", "following the index"
    lost_before, back_before = said(lost), said(back)
    with Clients(cluster, prompt) as clients:
        clients.answer_more(CLIENTS)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            ends = time.monotonic() + OUTAGE_S
            eventually(lambda: said(lost) > lost_before, "the router notices", OUTAGE_S)
            assert_affine(cluster, warm)
            meanwhile = ask(cluster, long_prompt("meanwhile"))
            assert meanwhile.usage.cached_tokens < 64
            clients.answer_more(CLIENTS)
            assert said(back) == back_before
            eventually(lambda: time.monotonic() >= ends - 1, "the last second", OUTAGE_S)
            assert_affine(cluster, warm)
            eventually(lambda: time.monotonic() >= ends, "the end of the outage", OUTAGE_S)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        eventually(lambda: said(back) > back_before, "the router follows again")
        clients.answer_more(CLIENTS)
    cluster.settled()
    wait_until_followed(cluster, server)
    assert_affine(cluster, warm)
    again = ask(cluster, long_prompt("meanwhile"))
    assert again.replica == meanwhile.replica
    assert again.usage.cached_tokens >= again.usage.prompt_tokens - BLOCK_TOKENS
    before = server.lives()
    (fresh,) = warm_up(cluster, ["afterwards"])  # perhaps in the place of something else: the caches may be full
    holder = fresh.holder
    eventually(lambda: server.lives()[holder].chunks - before[holder].chunks, "new prefixes are published")
    wait_until_followed(cluster, server)
    assert said(lost) == lost_before + 1


@pytest.mark.parametrize("how", ["emptied", "restarted"])
def test_redis_comes_back_empty(cluster: Any, server: Server, how: str) -> None:
    """Its replicas register again by themselves with all that they hold: under load, then to the last chunk."""
    cluster.settled()
    warm = warm_up(cluster, [f"{how} north", f"{how} south"])
    before = server.lives()

    def registered_again(share: float) -> bool:
        now = server.lives()
        return now.keys() == before.keys() and all(
            now[worker_id].epoch > life.epoch and len(now[worker_id].chunks & life.chunks) >= share * len(life.chunks)
            for worker_id, life in before.items()
        )

    with Clients(cluster, short_prompt) as clients:
        clients.answer_more(2 * CLIENTS)
        lose_everything(server, how)
        # Where the caches are full, what the clients ask pushes something out meanwhile.
        eventually(lambda: registered_again(0.8), "both registered again with what they hold", REGISTERED_AGAIN_S)
        clients.answer_more(2 * CLIENTS)
        assert_affine(cluster, warm)
    cluster.settled()
    wait_until_followed(cluster, server)
    before = server.lives()
    lose_everything(server, how)
    eventually(lambda: registered_again(1.0), "both registered again with all they hold", REGISTERED_AGAIN_S)
    wait_until_followed(cluster, server)
    assert_affine(cluster, warm)
    replicas = cluster.settled().replicas
    assert {r.worker_id: r.epoch for r in replicas} == {i: life.epoch for i, life in server.lives().items()}
    assert {r.worker_id: r.indexed_chunks for r in replicas} == {i: len(life.chunks) for i, life in before.items()}


def lose_everything(server: Server, how: str) -> None:
    """`restarted`: connections and scripts are gone too, as with another process on the old port."""
    with server.client.pipeline(transaction=True) as pipeline:
        pipeline.flushall()
        if how == "restarted":
            pipeline.script_flush()
            pipeline.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        pipeline.execute()


def test_the_router_process_dies(cluster: Any, server: Server) -> None:
    """The next one knows all holders from the first request on that its health check lets in."""
    cluster.settled()
    warm = warm_up(cluster, [f"yard {number}" for number in range(10)])
    for again in range(8):  # both replicas shall hold some; one may look slow for a while (router.fleet_speed)
        if len({holder for _, holder, _ in warm}) == 2:
            break
        time.sleep(8)
        warm += warm_up(cluster, [f"depot {again} {number}" for number in range(4)])
    assert len({holder for _, holder, _ in warm}) == 2
    wait_until_followed(cluster, server)
    before = indexed(cluster)
    (router,) = routers(cluster)
    os.kill(router, signal.SIGKILL)
    eventually(lambda: router not in routers(cluster), "the router process is gone")
    eventually(lambda: is_ready(cluster), "another router process answers", timeout_s=120)
    hits = 0
    for prompt, holder, cached_tokens in warm:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "temperature": 0}
        reply = httpx.post(f"{cluster.http_url}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        hits += reply.headers["x-kvray-replica"] == holder and cached == cached_tokens
    assert hits >= 0.95 * len(warm)
    (successor,) = routers(cluster)
    assert successor != router
    cluster.settled()
    assert indexed(cluster) == before


def routers(cluster: Any) -> list[int]:
    below = process_tree.descendants(cluster.process.pid)
    return [pid for pid in below if process_tree.command_of(pid).startswith("ray::ServeReplica:kvray:Ingress")]


def is_ready(cluster: Any) -> bool:
    try:
        return httpx.get(f"{cluster.http_url}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
