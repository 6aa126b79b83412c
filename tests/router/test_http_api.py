"""The OpenAI API: the official client against a real server, and every way to send it something wrong."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import openai
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from replica_infos import replica_info
from starlette.testclient import TestClient

from cluster.core import errors
from cluster.core.replica import Epoch, ReplicaLoad, WorkerId
from cluster.core.request import FinishReason
from cluster.index.known import FollowerState
from router.generation import GenerationCall, GenerationEvent, LogprobEntry, ReplicaStatus, Usage
from router.http_api import MAX_BODY_BYTES, Services, build_http_app
from router.readiness import Readiness
from router.reuse_counters import ReuseCounters

CHAT: list[Any] = [{"role": "user", "content": "hi"}]


class FakeGenerator:
    """Yields one event per word, then `error` if set, or waits forever if `hang`."""

    models: Sequence[str] = ("demo/model",)

    def __init__(self) -> None:
        self.calls: list[GenerationCall] = []
        self.error: Exception | None = None
        self.words = ["Hé", "", "llo 🎉"]
        self.hang = False
        self.logprobs: tuple[LogprobEntry, ...] | None = None
        self.closed = threading.Event()

    async def generate(self, call: GenerationCall) -> AsyncIterator[GenerationEvent]:
        self.calls.append(call)
        self.closed.clear()
        try:
            for index, word in enumerate(self.words):
                last = index == len(self.words) - 1 and self.error is None and not self.hang
                yield GenerationEvent(
                    text=word,
                    token_ids=(index,),
                    usage=Usage(prompt_tokens=5, completion_tokens=index + 1, cached_tokens=4),
                    replica=WorkerId("w1"),
                    finish_reason=FinishReason.STOP if last else None,
                    route=None if index else "prompt=5,seen=4",
                    logprobs=self.logprobs,
                    text_offsets=() if self.logprobs is None else tuple(range(len(self.logprobs))),
                )
            if self.error is not None:
                raise self.error
            if self.hang:
                await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)  # releasing may take a while, and must not be cut short
            self.closed.set()


class FakeStatus:
    is_ready = True

    def __init__(self) -> None:
        self.known: list[ReplicaStatus] = []

    def replicas(self) -> Sequence[ReplicaStatus]:
        return self.known

    def misses(self) -> ReuseCounters:
        return ReuseCounters()

    def ready(self) -> bool:
        return self.is_ready

    def readiness(self) -> Readiness:
        words = {WorkerId("w1"): "ready" if self.is_ready else "draining"}
        reason = "" if self.is_ready else "no replica is ready"
        return Readiness(ready=self.is_ready, reason=reason, index=FollowerState.FOLLOWING, replicas=words)


class World:
    def __init__(self) -> None:
        self.generator, self.status = FakeGenerator(), FakeStatus()
        self.app = build_http_app(lambda: Services(generator=self.generator, status=self.status))
        self.http = TestClient(self.app, raise_server_exceptions=False)

    def post(self, path: str, body: Any) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(path, content=content)

    @property
    def call(self) -> GenerationCall:
        return self.generator.calls[-1]


@pytest.fixture
def world() -> World:
    return World()


class Switch:
    """One server for all tests; `app` is the one of the test that runs."""

    def __init__(self) -> None:
        self.app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Switch, int]]:
    """A real server, because in-process clients neither stream nor disconnect."""
    switch = Switch()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(switch, log_level="warning", lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield switch, listener.getsockname()[1]
        server.should_exit = True
        thread.join(10)


@pytest.fixture
def port(server: tuple[Switch, int], world: World) -> int:
    server[0].app = world.app
    return server[1]


@pytest.fixture
def client(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as made:
        yield made


def sent(world: World, path: str, body: Any) -> dict[str, Any]:
    """The error object, after checking its form and that nothing was generated."""
    response = world.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert not world.generator.calls
    return dict(error)


# --- the official client ---


def test_openai_completion(client: openai.OpenAI, world: World) -> None:
    raw = client.completions.with_raw_response.create(
        model="demo/model", prompt="hi", stop="x", seed=3, extra_body={"top_k": 5, "ignore_eos": True, "mystery": 1}
    )
    reply = raw.parse()
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("Héllo 🎉", "stop")
    assert (reply.object, reply.model, reply.id[:5]) == ("text_completion", "demo/model", "cmpl-")
    assert abs(reply.created - time.time()) < 60
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert (reply.usage.total_tokens, reply.usage.prompt_tokens_details.cached_tokens) == (8, 4)
    assert (raw.headers["x-kvray-replica"], raw.headers["x-kvray-cached-tokens"]) == ("w1", "4")
    assert world.call.text == "hi"
    assert world.call.sampling == {"max_tokens": 16, "stop": ("x",), "seed": 3, "top_k": 5, "ignore_eos": True}


def test_openai_chat(client: openai.OpenAI, world: World) -> None:
    reply = client.chat.completions.create(model="", messages=CHAT, max_completion_tokens=9, temperature=0)
    assert (reply.object, reply.id[:9]) == ("chat.completion", "chatcmpl-")
    assert (reply.choices[0].message.role, reply.choices[0].message.content) == ("assistant", "Héllo 🎉")
    assert reply.model == "demo/model"
    assert world.call.messages == CHAT
    assert world.call.sampling == {"max_tokens": 9, "temperature": 0}


ENTRY = LogprobEntry(7, b"\xc3", -0.5, (LogprobEntry(8, b"e", -0.25), LogprobEntry(7, b"\xc3", -0.5)))


def test_openai_chat_logprobs(client: openai.OpenAI, world: World) -> None:
    world.generator.logprobs = (ENTRY,)
    asked: dict[str, Any] = {"model": "", "messages": CHAT, "logprobs": True, "top_logprobs": 2}
    reply = client.chat.completions.create(**asked, presence_penalty=0.5, logit_bias={"7": -3})
    assert reply.choices[0].logprobs is not None and reply.choices[0].logprobs.content is not None
    first, *others = reply.choices[0].logprobs.content
    assert (first.token, first.bytes, first.logprob, len(others)) == ("bytes:\\xc3", [0xC3], -0.5, 2)
    assert [(top.token, top.bytes, top.logprob) for top in first.top_logprobs] == [
        ("e", [101], -0.25),
        ("bytes:\\xc3", [0xC3], -0.5),
    ]
    assert world.call.sampling == {"logprobs": 2, "presence_penalty": 0.5, "logit_bias": ((7, -3),)}
    chunks = list(client.chat.completions.create(**asked, stream=True))
    told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert [len(logprobs.content or ()) for logprobs in told] == [1, 1, 1]


def test_openai_completion_logprobs(client: openai.OpenAI, world: World) -> None:
    world.generator.logprobs = (ENTRY,)
    reply = client.completions.create(model="", prompt="hi", logprobs=2, extra_body={"prompt_logprobs": 0})
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.token_logprobs) == (["bytes:\\xc3"] * 3, [-0.5] * 3)
    assert logprobs.top_logprobs == [{"e": -0.25, "bytes:\\xc3": -0.5}] * 3
    assert logprobs.text_offset == [0, 0, 0]
    assert world.call.sampling == {"max_tokens": 16, "logprobs": 2, "prompt_logprobs": 0}


def test_openai_completion_stream(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="demo/model", prompt="hi", stream=True)
    assert raw.headers["x-kvray-replica"] == "w1"
    chunks = list(raw.parse())
    assert [chunk.choices[0].text for chunk in chunks] == ["Hé", "", "llo 🎉"]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_openai_chat_stream_with_usage(client: openai.OpenAI) -> None:
    *chunks, last = client.chat.completions.create(
        model="demo/model", messages=CHAT, stream=True, stream_options={"include_usage": True}
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Héllo 🎉"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.prompt_tokens_details is not None
    assert (last.usage.completion_tokens, last.usage.prompt_tokens_details.cached_tokens) == (3, 4)


@pytest.mark.parametrize("stream", [None, False, True])
def test_the_front_door_knows_whether_anybody_reads_the_pieces(world: World, stream: bool | None) -> None:
    assert world.post("/v1/completions", {"prompt": "hi", "stream": stream}).status_code == 200
    assert world.call.streamed is bool(stream)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_headers_say_what_was_reused_and_why_not_more(world: World, path: str, stream: bool) -> None:
    prompt: dict[str, Any] = {"messages": CHAT} if "chat" in path else {"prompt": "hi"}
    reply = world.post(path, {**prompt, "stream": stream})
    assert reply.headers["x-kvray-route"] == "prompt=5,seen=4"
    first = reply.text.removeprefix("data: ").splitlines()[0]
    assert json.loads(first)["id"] == world.call.request_id  # by which the request can be explained later


def test_openai_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo/model"]
    assert client.models.retrieve("demo/model").owned_by == "kvray"
    with pytest.raises(openai.NotFoundError, match="other"):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.InvalidRequest("top_p", "top_p is too big"), openai.BadRequestError),
        (errors.ModelNotFound("no such model"), openai.NotFoundError),
        (errors.Unauthenticated("no key"), openai.AuthenticationError),
        (errors.Overloaded("full", retry_after_s=2.5), openai.RateLimitError),
        (errors.ReplicaLost("died"), openai.InternalServerError),
        (RuntimeError("secret"), openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token_have_their_status(
    client: openai.OpenAI, world: World, error: Exception, kind: type[openai.APIStatusError], stream: bool
) -> None:
    world.generator.error, world.generator.words = error, []
    with pytest.raises(kind) as caught:
        client.completions.create(model="demo/model", prompt="hi", stream=stream)
    assert "secret" not in str(caught.value)
    assert caught.value.response.headers.get("retry-after") == ("3" if kind is openai.RateLimitError else None)


def test_error_after_the_first_token_ends_the_stream(client: openai.OpenAI, world: World) -> None:
    world.generator.error = errors.ReplicaLost("the replica died")
    stream = client.completions.create(model="demo/model", prompt="hi", stream=True)
    assert [next(stream).choices[0].text for _ in range(3)] == ["Hé", "", "llo 🎉"]
    with pytest.raises(openai.APIError, match="the replica died"):
        next(stream)


# --- framing and disconnects ---


def test_stream_frames(world: World) -> None:
    response = world.post("/v1/chat/completions", {"messages": CHAT, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    assert all("usage" not in json.loads(event[6:]) for event in events[:-2])


def test_failed_stream_has_no_done(world: World) -> None:
    world.generator.error = errors.ReplicaLost("died")
    text = world.post("/v1/completions", {"prompt": "hi", "stream": True}).text
    assert json.loads(text.split("\n\n")[-2][6:])["error"]["code"] == "replica_lost"
    assert "[DONE]" not in text


@pytest.mark.parametrize(
    ("stream", "words"),
    [(True, ["a"]), (True, []), (False, [])],
    ids=["while streaming", "before the first token", "whole answer"],
)
def test_disconnect_closes_the_generator(world: World, port: int, stream: bool, words: list[str]) -> None:
    world.generator.hang, world.generator.words = True, words
    body = json.dumps({"prompt": "hi", "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        while not world.generator.calls:
            time.sleep(0.01)
        if words:
            assert b"200 OK" in connection.recv(4096)
        assert not world.generator.closed.wait(0.1)
    assert world.generator.closed.wait(5)


# --- refusals ---


def test_refusals_have_openai_form(world: World) -> None:
    error = sent(world, "/v1/completions", {"prompt": "a", "max_tokens": "5"})
    assert error["param"] == "max_tokens"
    assert sent(world, "/v1/chat/completions", b"\xff")["param"] == "body"


def test_body_limit(world: World) -> None:
    fits = b'{"prompt": "' + b"a" * (MAX_BODY_BYTES - 14) + b'"}'
    assert world.post("/v1/completions", fits).status_code == 200
    world.generator.calls.clear()
    assert "larger than" in sent(world, "/v1/completions", fits + b" ")["message"]


def test_unknown_paths_and_methods_have_the_same_form(world: World) -> None:
    for response, status in ((world.http.get("/v1/nope"), 404), (world.http.get("/v1/completions"), 405)):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_alive_and_ready_are_two_questions(world: World) -> None:
    reply = world.http.get("/ready")
    assert (reply.status_code, reply.json()) == (
        200,
        {"status": "ready", "index": "following", "replicas": {"w1": "ready"}},
    )
    world.status.is_ready = False
    reply = world.http.get("/ready")
    assert (reply.status_code, reply.json()) == (
        503,
        {
            "status": "not ready",
            "reason": "no replica is ready",
            "index": "following",
            "replicas": {"w1": "draining"},
        },
    )
    assert world.http.get("/health").status_code == 200


def test_the_fleet_for_prometheus(world: World) -> None:
    for name, running, hits in (("w1", 2, 300), ("w2", 0, 0)):
        info = replica_info(name, model="demo")
        load = ReplicaLoad(running=running, in_use_blocks=25, total_blocks=100, query_tokens=1000, hit_tokens=hits)
        world.status.known.append(ReplicaStatus(info=info, epoch=Epoch(1), load=load, indexed_chunks=7))
    reply = world.http.get("/metrics")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    samples = {
        (sample.name, sample.labels.get("replica")): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }
    assert samples["kvray_ready", None] == 1
    assert samples["kvray_replicas_ready", None] == 1
    assert samples["kvray_num_requests_running", "w1"] == 2
    assert samples["kvray_num_requests_running", "w2"] == 0
    assert samples["kvray_kv_cache_usage_perc", "w1"] == 0.25
    assert samples["kvray_prefix_cache_hits_total", "w1"] == 300
    assert samples["kvray_prefix_cache_queries_total", "w2"] == 1000
    assert samples["kvray_index_chunks", "w1"] == 7
    world.status.is_ready = False
    assert "kvray_ready 0.0" in world.http.get("/metrics").text


def test_services_that_are_not_there_yet() -> None:
    def missing() -> Services:
        raise errors.ReplicaLost("starting")

    http = TestClient(build_http_app(missing), raise_server_exceptions=False)
    assert http.get("/health").status_code == 200
    reply = http.get("/ready")
    assert (reply.status_code, reply.json()["reason"]) == (503, "starting")
    for response in (http.get("/v1/models"), http.post("/v1/completions", json={"prompt": "a"})):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "replica_lost"
