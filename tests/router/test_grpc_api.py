"""The gRPC methods on a real server, with a fake generator behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from replica_infos import replica_info

from cluster.core import errors
from cluster.core.constraint import Constraint
from cluster.core.replica import Epoch, ReplicaLoad, WorkerId
from cluster.core.request import FinishReason
from cluster.rpc import inference_pb2 as pb
from cluster.rpc import inference_pb2_grpc as pb_grpc
from router.generation import GenerationCall, GenerationEvent, ReplicaStatus, Usage
from router.grpc_api import GrpcApi
from router.readiness import Readiness
from router.reuse_counters import ReuseCounters
from router.reuse_explanation import Loss, LossReason, ReuseExplanation
from router.route_explanation import RouteExplanation
from router.scoring import Candidate, Score

CODE = grpc.StatusCode
ROUTE = "prompt=5,seen=4,held=4,chosen=4,reused=4;diverged=1@4/m0"
EXPLANATION = RouteExplanation(
    request_id="r",
    worker_id=WorkerId("w1"),
    candidates=(
        Score(Candidate(worker_id=WorkerId("w1"), overlap_tokens=4, ahead_tokens=7, running=1), 0.5),
        Score(Candidate(worker_id=WorkerId("w2"), lost=True), 0.25),
    ),
    reuse=ReuseExplanation(
        prompt_tokens=5,
        seen_tokens=4,
        held_tokens=4,
        chosen_tokens=4,
        reused_tokens=4,
        losses=(Loss(reason=LossReason.DIVERGED, tokens=1, position=4, message=0),),
    ),
    dry_run=False,
)


class FakeGenerator:
    """Yields one event per word, then `error` if set, or waits forever if `hang`."""

    models: Sequence[str] = ("demo",)

    def __init__(self) -> None:
        self.calls: list[GenerationCall] = []
        self.error: Exception | None = None
        self.words = ["Hel", "lo"]
        self.hang = False
        self.closed = asyncio.Event()

    async def generate(self, call: GenerationCall) -> AsyncIterator[GenerationEvent]:
        self.calls.append(call)
        try:
            for index, word in enumerate(self.words):
                last = index == len(self.words) - 1 and self.error is None and not self.hang
                yield GenerationEvent(
                    text=word,
                    token_ids=(index, index + 1),
                    usage=Usage(prompt_tokens=5, completion_tokens=2 * index + 2, cached_tokens=4),
                    replica=WorkerId("w1"),
                    finish_reason=FinishReason.LENGTH if last else None,
                    route=None if index else ROUTE,
                )
            if self.error is not None:
                raise self.error
            if self.hang:
                await asyncio.sleep(60)
        finally:
            self.closed.set()


class FakeStatus:
    def __init__(self) -> None:
        self.is_ready = True
        self.reuse = ReuseCounters()
        self.rows: list[ReplicaStatus] = []

    def replicas(self) -> Sequence[ReplicaStatus]:
        return self.rows

    def misses(self) -> ReuseCounters:
        return self.reuse

    def ready(self) -> bool:
        return self.is_ready

    def readiness(self) -> Readiness:
        raise AssertionError("health asks for yes or no")


class FakeExplainer:
    """Explains everything in the same way, but for the id "unknown"."""

    def __init__(self) -> None:
        self.calls: list[GenerationCall] = []

    async def explain(self, call: GenerationCall) -> RouteExplanation:
        self.calls.append(call)
        return replace(EXPLANATION, dry_run=True)

    def explained(self, request_id: str) -> RouteExplanation | None:
        return None if request_id == "unknown" else EXPLANATION


class Servicer:
    """The way the ingress delegates."""

    def __init__(self, api: GrpcApi) -> None:
        self.Generate = api.generate
        self.GenerateOnce = api.generate_once
        self.Status = api.status
        self.ExplainRoute = api.explain_route
        self.Record = api.record
        self.Check = api.health_check
        self.Watch = api.health_watch
        self.List = api.health_list


class World:
    def __init__(self) -> None:
        self.generator = FakeGenerator()
        self.status = FakeStatus()
        self.explainer = FakeExplainer()
        self.api = GrpcApi(
            self.generator,
            self.status,
            ["demo"],
            explainer=self.explainer,
            router_id="router-1",
            watch_interval_s=0.01,
        )
        self.channel: Any = None

    @property
    def inference(self) -> Any:
        return pb_grpc.InferenceStub(self.channel)

    @property
    def health(self) -> Any:
        return health_pb2_grpc.HealthStub(self.channel)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[World]:
        server = grpc.aio.server()
        servicer = Servicer(self.api)
        pb_grpc.add_InferenceServicer_to_server(servicer, server)
        pb_grpc.add_CacheServicer_to_server(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as self.channel:
                yield self
        finally:
            await server.stop(None)


def request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"text": "hi"} | fields))


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_stream_and_whole_answer_agree() -> None:
    async with World().serving() as world:
        chunks = [c async for c in world.inference.Generate(request())]
        whole = await world.inference.GenerateOnce(request())
    assert [c.text for c in chunks] == ["Hel", "lo"]
    assert {c.request_id for c in chunks} == {chunks[0].request_id} != {""}
    assert [c.finish_reason for c in chunks] == [pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_LENGTH]
    assert (whole.text, list(whole.token_ids), whole.replica) == ("Hello", [0, 1, 1, 2], "w1")
    assert whole.finish_reason == pb.FINISH_REASON_LENGTH
    assert whole.usage == chunks[-1].usage == pb.Usage(prompt_tokens=5, completion_tokens=4, cached_tokens=4)


async def test_request_becomes_a_call() -> None:
    sampling = pb.SamplingOptions(
        temperature=0.1, top_k=0, top_p=0.9, seed=-1, max_tokens=7, stop=["a"], stop_token_ids=[3], ignore_eos=False
    )
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="é")])
    async with World().serving() as world:
        await world.inference.GenerateOnce(request(model="demo", cache_salt="s", sampling=sampling))
        await world.inference.GenerateOnce(pb.GenerateRequest(chat=chat), timeout=50)
        await world.inference.GenerateOnce(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[4, 5])))
        first, second, third = world.generator.calls
    assert (first.text, first.model, first.cache_salt, first.timeout_s) == ("hi", "demo", "s", None)
    assert first.sampling == {
        "temperature": 0.1,
        "top_k": 0,
        "top_p": 0.9,
        "seed": -1,
        "max_tokens": 7,
        "stop": ("a",),
        "stop_token_ids": (3,),
        "ignore_eos": False,
    }
    assert (second.messages, second.sampling) == ([{"role": "user", "content": "é"}], {})
    assert second.timeout_s is not None
    assert 40 < second.timeout_s < 60
    assert third.token_ids == (4, 5)
    assert first.constraint is None


async def test_constraints_arrive() -> None:
    choice = pb.ChoiceStrings(strings=["yes", "no"])
    sent = {
        pb.Constraint(json_object=True).SerializeToString(): Constraint.json_object(),
        pb.Constraint(json_schema='{"type": "object"}').SerializeToString(): Constraint.json_schema({"type": "object"}),
        pb.Constraint(regex="a+").SerializeToString(): Constraint.regex("a+"),
        pb.Constraint(choice=choice).SerializeToString(): Constraint.choice(["yes", "no"]),
        pb.Constraint(grammar='start: "a"').SerializeToString(): Constraint.grammar('start: "a"'),
    }
    async with World().serving() as world:
        for message in sent:
            await world.inference.GenerateOnce(request(constraint=pb.Constraint.FromString(message)))
    assert [call.constraint for call in world.generator.calls] == list(sent.values())


@pytest.mark.parametrize(
    ("constraint", "says"),
    [
        (pb.Constraint(), "constraint is empty"),
        (pb.Constraint(json_object=False), "constraint.json_object"),
        (pb.Constraint(json_schema="{"), "json_schema is not valid JSON"),
        (pb.Constraint(json_schema="[]"), "json_schema must be a JSON object"),
        (pb.Constraint(regex=""), "regex is empty"),
        (pb.Constraint(choice=pb.ChoiceStrings()), "choice"),
        (pb.Constraint(grammar="x" * 70_000), "grammar has 70000 bytes"),
    ],
    ids=str,
)
async def test_wrong_constraints_say_what_is_wrong(constraint: pb.Constraint, says: str) -> None:
    async with World().serving() as world:
        error = await failure(world.inference.GenerateOnce(request(constraint=constraint)))
    assert error.code() == CODE.INVALID_ARGUMENT
    assert says in (error.details() or "")
    assert not world.generator.calls


async def test_request_id_of_the_client_is_used() -> None:
    async with World().serving() as world:
        reply = await world.inference.GenerateOnce(request(), metadata=(("request_id", "mine"),))
    assert reply.request_id == "mine"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(), "input"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, -1])), "token_ids"),
        (pb.GenerateRequest(chat=pb.ChatMessages()), "chat.messages"),
        (pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(content="x")])), "chat.messages[0].role"),
    ],
)
async def test_bad_prompts_name_their_field(message: pb.GenerateRequest, field: str) -> None:
    async with World().serving() as world:
        error = await failure(world.inference.GenerateOnce(message))
        assert not world.generator.calls
    assert error.code() == CODE.INVALID_ARGUMENT
    assert field in (error.details() or "")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequest("top_p", "top_p is too big"), CODE.INVALID_ARGUMENT),
        (errors.ModelNotFound("no model x"), CODE.NOT_FOUND),
        (errors.Overloaded("queue full", retry_after_s=3), CODE.RESOURCE_EXHAUSTED),
        (errors.ReplicaLost("replica died"), CODE.UNAVAILABLE),
        (errors.DeadlineExceeded("too late"), CODE.DEADLINE_EXCEEDED),
    ],
)
@pytest.mark.parametrize("words", [[], ["Hel"]], ids=["before the first token", "after it"])
async def test_errors_have_code_and_message(error: errors.KvrayError, code: Any, words: list[str]) -> None:
    async with World().serving() as world:
        world.generator.error, world.generator.words = error, words
        once = await failure(world.inference.GenerateOnce(request()))
        stream = world.inference.Generate(request())
        seen = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for chunk in stream:
                seen.append(chunk.text)  # noqa: PERF401
        assert seen == words
    for failed in (once, caught.value):
        assert failed.code() == code
        assert error.message in (failed.details() or "")
        retry = dict(failed.trailing_metadata() or ()).get("retry-after")
        assert retry == ("3" if isinstance(error, errors.Overloaded) else None)


async def test_internal_errors_tell_nothing() -> None:
    async with World().serving() as world:
        world.generator.error = RuntimeError("secret path")
        error = await failure(world.inference.GenerateOnce(request()))
    assert error.code() == CODE.INTERNAL
    assert "secret" not in (error.details() or "")


@pytest.mark.parametrize("leave", [lambda call: call.cancel(), None], ids=["cancel", "deadline"])
async def test_leaving_closes_the_generator(leave: Callable[[Any], Any] | None) -> None:
    async with World().serving() as world:
        world.generator.hang = True
        call = world.inference.Generate(request(), timeout=0.3 if leave is None else None)
        assert (await call.read()).text == "Hel"
        if leave is not None:
            leave(call)
        await asyncio.wait_for(world.generator.closed.wait(), 5)


class ServeLikeContext:
    """What Serve hands over: no deadline, and no abort."""

    def __init__(self) -> None:
        self.code: Any = None
        self.details = ""
        self.trailing: list[tuple[str, str]] = []

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None:
        self.trailing = trailing_metadata

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        return [("x-bin", b"1"), ("request_id", "r1")]


async def test_serve_context_gets_code_details_and_an_exception() -> None:
    world, context = World(), ServeLikeContext()
    reply = await world.api.generate_once(request(), context)
    assert (reply.request_id, world.generator.calls[0].timeout_s) == ("r1", None)
    world.generator.error = errors.Overloaded("queue full")
    with pytest.raises(errors.KvrayError, match="queue full"):
        await world.api.generate_once(request(), context)
    assert (context.code, context.details) == (CODE.RESOURCE_EXHAUSTED, "queue full")
    assert context.trailing == [("retry-after", "1")]


async def test_abandoned_stream_closes_the_generator() -> None:
    world = World()
    stream = world.api.generate(request(), ServeLikeContext())
    await anext(stream)
    await stream.aclose()
    assert world.generator.closed.is_set()


async def test_status() -> None:
    info = replica_info("w1", num_blocks=10, max_model_len=128, model="demo")
    load = ReplicaLoad(waiting=1, running=2, uncached_tokens={"a": 3, "b": 4}, free_blocks=5, cached_blocks=3)
    async with World().serving() as world:
        world.status.rows = [ReplicaStatus(info=info, epoch=Epoch(2**50), load=load, indexed_chunks=9)]
        cache: Any = pb_grpc.CacheStub(world.channel)
        reply = await cache.Status(pb.StatusRequest())
    assert (list(reply.models), reply.ready) == (["demo"], True)
    (row,) = reply.replicas
    assert (row.worker_id, row.epoch, row.uncached_tokens, row.free_blocks) == ("w1", 2**50, 7, 5)
    assert (row.waiting, row.running, row.indexed_chunks, row.max_model_len) == (1, 2, 9, 128)


async def test_health_check_and_list() -> None:
    kinds = health_pb2.HealthCheckResponse
    async with World().serving() as world:
        for service in ("", "kvray.v1.Inference", "kvray.v1.Cache"):
            reply = await world.health.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == kinds.SERVING
        world.status.is_ready = False
        assert (await world.health.Check(health_pb2.HealthCheckRequest())).status == kinds.NOT_SERVING
        listed = await world.health.List(health_pb2.HealthListRequest())
        assert set(listed.statuses) == {"", "kvray.v1.Inference", "kvray.v1.Cache"}
        unknown = await failure(world.health.Check(health_pb2.HealthCheckRequest(service="nope")))
        assert unknown.code() == CODE.NOT_FOUND


async def test_health_watch_tells_changes_only() -> None:
    kinds = health_pb2.HealthCheckResponse
    async with World().serving() as world:
        watch = world.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == kinds.SERVING
        await asyncio.sleep(0.05)
        world.status.is_ready = False
        assert (await asyncio.wait_for(watch.read(), 5)).status == kinds.NOT_SERVING
        watch.cancel()
        unknown = world.health.Watch(health_pb2.HealthCheckRequest(service="nope"))
        assert (await unknown.read()).status == kinds.SERVICE_UNKNOWN
        unknown.cancel()


# --- explanations ---


async def trailing(call: Any) -> dict[str, str]:
    return {key: value for key, value in await call.trailing_metadata() if key.startswith("x-kvray")}


async def test_the_route_is_in_the_trailing_metadata() -> None:
    async with World().serving() as world:
        stream = world.inference.Generate(request())
        assert [c.text async for c in stream] == ["Hel", "lo"]
        assert await trailing(stream) == {"x-kvray-route": ROUTE, "x-kvray-router": "router-1"}
        whole = world.inference.GenerateOnce(request())
        await whole
        assert await trailing(whole) == {"x-kvray-route": ROUTE, "x-kvray-router": "router-1"}


async def test_the_clients_id_is_told_to_the_front_door() -> None:
    async with World().serving() as world:
        chunks = [c async for c in world.inference.Generate(request(), metadata=(("request_id", "mine"),))]
        await world.inference.GenerateOnce(request())
    assert chunks[0].request_id == "mine" == world.generator.calls[0].request_id
    assert len(world.generator.calls[1].request_id) == 32


async def test_explain_route_tells_of_a_request_that_was_sent() -> None:
    async with World().serving() as world:
        reply = await pb_grpc.CacheStub(world.channel).ExplainRoute(pb.ExplainRouteRequest(request_id="mine"))
    assert (reply.request_id, reply.replica, reply.dry_run) == ("r", "w1", False)
    assert [(c.replica, c.overlap_tokens, c.ahead_tokens, c.running, c.cost, c.lost) for c in reply.candidates] == [
        ("w1", 4, 7, 1, 0.5, False),
        ("w2", 0, 0, 0, 0.25, True),
    ]
    loss = pb.ReuseLoss(reason=pb.LOSS_REASON_DIVERGED, tokens=1, position=4, message=0)
    counts = {f"{name}_tokens": 4 for name in ("seen", "held", "chosen", "reused")}
    assert reply.reuse == pb.ReuseExplanation(prompt_tokens=5, losses=[loss], **counts)
    assert reply.reuse.losses[0].HasField("message")


async def test_explain_route_as_a_dry_run_generates_nothing() -> None:
    async with World().serving() as world:
        dry = pb.ExplainRouteRequest(request=request(cache_salt="s"))
        reply = await pb_grpc.CacheStub(world.channel).ExplainRoute(dry)
    assert reply.dry_run
    assert [(call.text, call.cache_salt) for call in world.explainer.calls] == [("hi", "s")]
    assert not world.generator.calls


async def test_explain_route_refuses_what_it_cannot_tell() -> None:
    async with World().serving() as world:
        stub = pb_grpc.CacheStub(world.channel)
        unknown = await failure(stub.ExplainRoute(pb.ExplainRouteRequest(request_id="unknown")))
        nothing = await failure(stub.ExplainRoute(pb.ExplainRouteRequest()))
        no_prompt = await failure(stub.ExplainRoute(pb.ExplainRouteRequest(request=pb.GenerateRequest())))
    assert (unknown.code(), nothing.code(), no_prompt.code()) == (
        CODE.NOT_FOUND,
        CODE.INVALID_ARGUMENT,
        CODE.INVALID_ARGUMENT,
    )
    assert "request_id" in (nothing.details() or "")


async def test_status_tells_the_misses_when_asked() -> None:
    async with World().serving() as world:
        assert EXPLANATION.reuse is not None
        world.status.reuse.count("r", WorkerId("w1"), EXPLANATION.reuse)
        stub = pb_grpc.CacheStub(world.channel)
        assert not (await stub.Status(pb.StatusRequest())).HasField("reuse")
        reuse = (await stub.Status(pb.StatusRequest(misses=True))).reuse
    assert (reuse.requests, reuse.prompt_tokens, reuse.reused_tokens) == (1, 5, 4)
    assert {total.reason: total.tokens for total in reuse.losses if total.tokens} == {pb.LOSS_REASON_DIVERGED: 1}
    assert len(reuse.losses) == len(LossReason)
    (example,) = next(total for total in reuse.losses if total.tokens).examples
    assert (example.request_id, example.replica, example.prompt_tokens) == ("r", "w1", 5)
