"""A whole session against small OpenAI-like servers in this process: order, noise, failures, counts, time limit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from cluster.bench.background_load import BackgroundLoad
from cluster.bench.http_peer import HttpPeer, open_http
from cluster.bench.peer import Peer
from cluster.bench.run_meter import Usage
from cluster.bench.run_record import RunRecord, Verdict
from cluster.bench.session import Session, SessionSettings
from cluster.bench.workloads import TurnShape, Workload
from cluster.core.errors import ConfigError, KvrayError

WORDS = [f"word{letter}" for letter in "abcdefghijklmnop"]
ONE = Workload(name="one", conversations=((TurnShape(words=5, max_tokens=3),),))
CHATS = Workload(name="chats", conversations=((TurnShape(words=4, max_tokens=2),) * 2,) * 3, concurrency=2)
UNCACHED = Workload(name="uncached", conversations=ONE.conversations, caching=False)


class FakeServer:
    """Answers with "w" per token. `sent`: all bodies but those of the warm-up."""

    def __init__(self, owner: str = "kvray", *, reports_cache: bool = True) -> None:
        self.owner = owner
        self.reports_cache = reports_cache
        self.sent: list[dict[str, Any]] = []
        self.fail_from: int | None = None
        self.delay_s = 0.0
        self.at_once = self.most_at_once = 0
        self.url = ""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": f"{self.owner}-model", "owned_by": self.owner}, {"id": "other"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["max_tokens"] != 8:
            self.sent.append(body)
        if self.fail_from is not None and len(self.sent) > self.fail_from:
            return web.json_response({"error": {"message": "out of\nmemory"}}, status=500)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for _ in range(body["max_tokens"]):
            await self._say(reply, {"choices": [{"text": " w"}]})
            await asyncio.sleep(self.delay_s)
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
        if self.reports_cache:
            usage["prompt_tokens_details"] = {"cached_tokens": 2}
        await self._say(reply, {"choices": [], "usage": usage})
        await reply.write(b"data: [DONE]\n\n")
        self.at_once -= 1
        return reply

    async def _say(self, reply: web.StreamResponse, chunk: dict[str, Any]) -> None:
        await reply.write(f"data: {json.dumps(chunk)}\n\n".encode())

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.get("/v1/models", self.models), web.post("/v1/completions", self.completions)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner


class ScriptedMeter:
    """Noise as scripted, then none."""

    def __init__(self, *noise: float) -> None:
        self.noise = list(noise)
        self.waits: list[float] = []

    async def wait_for_quiet(self, longest_s: float) -> None:
        self.waits.append(longest_s)

    def start(self, peer: Peer) -> None:
        pass

    def stop(self) -> Usage:
        return Usage(noise=self.noise.pop(0) if self.noise else 0.0)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_http(30) as session:
        yield session


@pytest.fixture
async def servers() -> AsyncIterator[list[FakeServer]]:
    started = [FakeServer("kvray"), FakeServer("llamacpp", reports_cache=False), FakeServer("someone")]
    runners = [await server.start() for server in started]
    yield started
    for runner in runners:
        await runner.cleanup()


async def peers_of(http: aiohttp.ClientSession, servers: list[FakeServer]) -> list[Peer]:
    peers = [HttpPeer(http, server.owner, server.url, None) for server in servers]
    for peer in peers:
        await peer.connect()
    return list(peers)


async def run(
    peers: list[Peer], workloads: list[Workload], meter: ScriptedMeter | None = None, **settings: Any
) -> list[RunRecord]:
    options = {"salt": "salt", "repetitions": 1, **settings}
    session = Session(peers, workloads, WORDS, SessionSettings(**options), meter or ScriptedMeter())
    await session.warm_up()
    await session.run()
    return session.records


async def test_runs_are_interleaved(http: aiohttp.ClientSession, servers: list[FakeServer]) -> None:
    records = await run(await peers_of(http, servers[:2]), [ONE, CHATS], repetitions=2)
    assert [(r.repetition, r.workload, r.peer) for r in records] == [
        (repetition, workload, peer)
        for repetition in (0, 1)
        for workload in ("one", "chats")
        for peer in ("kvray", "llamacpp")
    ]
    assert all(record.verdict is Verdict.KEPT for record in records)


async def test_the_first_model_is_asked_greedily_and_to_the_end(
    http: aiohttp.ClientSession, servers: list[FakeServer]
) -> None:
    await run(await peers_of(http, servers[:1]), [ONE])
    (body,) = servers[0].sent
    assert len(body.pop("prompt").split()) == 5
    assert body == {
        "model": "kvray-model",
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_a_conversation_brings_its_history_and_concurrency_is_kept(
    http: aiohttp.ClientSession, servers: list[FakeServer]
) -> None:
    servers[0].delay_s = 0.02
    (record,) = await run(await peers_of(http, servers[:1]), [CHATS])
    assert servers[0].most_at_once == 2
    prompts = [body["prompt"] for body in servers[0].sent]
    firsts = [prompt for prompt in prompts if len(prompt.split()) == 4]
    seconds = [prompt for prompt in prompts if len(prompt.split()) == 4 + 2 + 4]
    assert len(firsts) == len(seconds) == 3
    assert all(any(second.startswith(first + " w w") for second in seconds) for first in firsts)
    assert record.figures["requests"] == 6
    assert record.figures["answer_tokens"] == record.asked_tokens == 12
    assert record.figures["cached_tokens"] == 12


async def test_every_run_has_texts_of_its_own(http: aiohttp.ClientSession, servers: list[FakeServer]) -> None:
    meter = ScriptedMeter(0.5, 0.5)
    await run(await peers_of(http, servers[:1]), [ONE], meter, repetitions=2)
    prompts = [body["prompt"] for body in servers[0].sent]
    assert len(prompts) == len(set(prompts)) == 3


async def test_noisy_runs_are_dropped_and_tried_again(http: aiohttp.ClientSession, servers: list[FakeServer]) -> None:
    meter = ScriptedMeter(0.5, 0.12, 0.5, 0.3)
    records = await run(await peers_of(http, servers[:2]), [ONE], meter, retries=1, quiet_wait_s=7.0)
    assert [(r.peer, r.attempt, str(r.verdict)) for r in records] == [
        ("kvray", 0, "noisy"),
        ("kvray", 1, "kept"),
        ("llamacpp", 0, "noisy"),
        ("llamacpp", 1, "noisy"),
    ]
    assert meter.waits == [7.0] * 4


async def test_a_failing_peer_does_not_stop_the_others(http: aiohttp.ClientSession, servers: list[FakeServer]) -> None:
    servers[0].fail_from = 2
    records = await run(await peers_of(http, servers[:2]), [CHATS, ONE])
    assert [(r.peer, str(r.verdict)) for r in records] == [
        ("kvray", "failed"),
        ("llamacpp", "kept"),
        ("kvray", "failed"),
        ("llamacpp", "kept"),
    ]
    assert records[0].reason == 'HTTP 500: {"error": {"message": "out of\\nmemory"}}'
    assert records[0].figures == {}


async def test_cached_tokens_that_are_not_reported(http: aiohttp.ClientSession, servers: list[FakeServer]) -> None:
    records = await run(await peers_of(http, servers[:2]), [ONE])
    assert [record.figures["cached_tokens"] for record in records] == [2, None]


async def test_the_cache_is_defeated_where_there_is_a_switch(
    http: aiohttp.ClientSession, servers: list[FakeServer]
) -> None:
    records = await run(await peers_of(http, servers), [UNCACHED], repetitions=2)
    assert {record.peer for record in records} == {"kvray", "llamacpp"}
    salts = [body["cache_salt"] for body in servers[0].sent]
    assert len(set(salts)) == 2
    assert [body["cache_prompt"] for body in servers[1].sent] == [False, False]
    assert servers[2].sent == []


async def test_the_time_limit_cuts_a_run_and_begins_no_other(
    http: aiohttp.ClientSession, servers: list[FakeServer]
) -> None:
    peers = await peers_of(http, servers[:2])
    settings = SessionSettings(salt="s", repetitions=5, time_limit_s=0.4)
    session = Session(peers, [ONE], WORDS, settings, ScriptedMeter())
    servers[0].delay_s = 5.0
    await session.run()
    assert [(r.peer, r.reason) for r in session.records] == [("kvray", "cut off by the time limit")]
    assert session.interrupted == "stopped after 0.4 s"


async def test_an_interrupted_session_keeps_what_it_has(http: aiohttp.ClientSession, servers: list[FakeServer]) -> None:
    servers[1].delay_s = 5.0
    session = Session(await peers_of(http, servers[:2]), [ONE], WORDS, SessionSettings(salt="s"), ScriptedMeter())
    running = asyncio.create_task(session.run())
    while not session.records:
        await asyncio.sleep(0.01)
    running.cancel()
    await running
    assert [record.peer for record in session.records] == ["kvray"]
    assert session.interrupted == "stopped by Ctrl-C"


async def test_a_peer_that_cannot_be_used_is_named(http: aiohttp.ClientSession, servers: list[FakeServer]) -> None:
    with pytest.raises(ConfigError, match="peer gone: no server answers at http"):
        await HttpPeer(http, "gone", "http://127.0.0.1:9", None).connect()
    unlisted = HttpPeer(http, "unlisted", f"{servers[0].url}/elsewhere", None)
    await unlisted.connect()  # a server need not list its models
    with pytest.raises(ConfigError, match=r"peer unlisted cannot answer: HTTP 404"):
        await run([unlisted], [ONE])
    peers = await peers_of(http, servers[:1])
    servers[0].fail_from = -1
    with pytest.raises(ConfigError, match="peer kvray cannot answer: HTTP 500"):
        await run(peers, [ONE])


async def test_a_connection_that_breaks_is_one_line(http: aiohttp.ClientSession) -> None:
    peer = HttpPeer(http, "gone", "http://127.0.0.1:9", None)
    with pytest.raises(KvrayError, match="the connection failed: "):
        await peer.complete("a", 1, caching=True)


async def test_a_background_load_is_recorded_and_ends(http: aiohttp.ClientSession, servers: list[FakeServer]) -> None:
    servers[0].delay_s = 0.1
    load = BackgroundLoad(0.3, cores=1)
    session = Session(
        await peers_of(http, servers[:1]), [ONE], WORDS, SessionSettings(salt="s"), ScriptedMeter(), load=load
    )
    await session.run()
    record = session.records[0]
    assert record.load_asked == 0.3
    assert record.load_taken is not None
    assert 0.02 < record.load_taken < 0.6
