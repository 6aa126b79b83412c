"""Priority, deadlines and overload from a client to the replica and back: both protocols, streaming and not."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from fake_dispatcher import HANG, TOKENIZER, Attempt, DoorWorld, Step, answer, delta
from starlette.testclient import TestClient

from cluster.core.errors import DeadlineExceeded, KvrayError, Overloaded
from cluster.rpc import inference_pb2 as pb
from router.generation import GenerationCall, ReplicaStatus
from router.grpc_api import GrpcApi
from router.http_api import Services, build_http_app
from router.readiness import Readiness
from router.reuse_counters import ReuseCounters

CODE = grpc.StatusCode
PROMPTS = {
    "/v1/completions": '"prompt": "hi"',
    "/v1/chat/completions": '"messages": [{"role": "user", "content": "hi"}]',
}
PATHS = list(PROMPTS)
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


class NoStatus:
    def replicas(self) -> Sequence[ReplicaStatus]:
        return []

    def misses(self) -> ReuseCounters:
        return ReuseCounters()

    def ready(self) -> bool:
        return True

    def readiness(self) -> Readiness:
        raise AssertionError("nobody asks")


def http(world: DoorWorld, path: str, fields: str, *, stream: bool) -> Any:
    """`fields` is the JSON text of more members, because Python writes no JSON that is as wrong."""
    app = build_http_app(lambda: Services(generator=world.door, status=NoStatus()))
    body = "{" + PROMPTS[path] + (f", {fields}" if fields else "") + f', "stream": {json.dumps(stream)}' + "}"
    return TestClient(app, raise_server_exceptions=False).post(path, content=body.encode())


@dataclass
class Context:
    """What Serve hands over; it does not know the client's deadline."""

    code: Any = None
    details: str = ""
    trailing: list[tuple[str, str]] = field(default_factory=list)

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None:
        self.trailing = trailing_metadata

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        return []


@dataclass
class TimedContext(Context):
    """What a plain gRPC server hands over."""

    left_s: float | None = None

    def time_remaining(self) -> float | None:
        return self.left_s


async def rpc(world: DoorWorld, message: pb.GenerateRequest, context: Context, *, stream: bool) -> str:
    api = GrpcApi(world.door, NoStatus(), ["demo"], explainer=world.door, router_id="router-1")
    if not stream:
        return (await api.generate_once(message, context)).text
    async with aclosing(api.generate(message, context)) as chunks:
        return "".join([chunk.text async for chunk in chunks])


async def refused_rpc(world: DoorWorld, message: pb.GenerateRequest, context: Context, *, stream: bool) -> Context:
    with pytest.raises(KvrayError):
        await rpc(world, message, context, stream=stream)
    return context


def served(text: str = "ok") -> DoorWorld:
    return DoorWorld([Attempt("a", answer(text))], clock=lambda: 100.0)


# --- what arrives ---


@STREAM
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "priority", "timeout_s"),
    [
        ("", 0, None),
        ('"priority": null, "timeout_s": null', 0, None),
        ('"priority": -5, "timeout_s": 30', -5, 30),
        ('"priority": 2147483647, "timeout_s": 0.25', 2**31 - 1, 0.25),
        ('"priority": -2147483647', -(2**31) + 1, None),
    ],
)
def test_http_fields_reach_the_engine(
    path: str, fields: str, priority: int, timeout_s: float | None, stream: bool
) -> None:
    world = served()
    assert http(world, path, fields, stream=stream).status_code == 200
    assert (world.request.priority, world.request.timeout_s) == (priority, timeout_s)


@STREAM
@pytest.mark.parametrize(
    ("fields", "left_s", "priority", "timeout_s"),
    [
        ({}, None, 0, None),
        ({"priority": 7, "timeout_s": 30.0}, None, 7, 30),
        ({"priority": -7}, 20.0, -7, 20),
        ({"timeout_s": 30.0}, 20.0, 0, 20),
        ({"timeout_s": 10.0}, 20.0, 0, 10),
    ],
)
async def test_grpc_fields_reach_the_engine(
    fields: dict[str, Any], left_s: float | None, priority: int, timeout_s: float | None, stream: bool
) -> None:
    """Of the field and the call's own deadline the earlier one counts."""
    world = served()
    context = Context() if left_s is None else TimedContext(left_s=left_s)
    assert await rpc(world, pb.GenerateRequest(text="hi", **fields), context, stream=stream) == "ok"
    assert (world.request.priority, world.request.timeout_s) == (priority, timeout_s)


# --- bad input ---

BAD_PRIORITIES = ['"high"', "1099511627776", "-2147483648", "true", "1.5", "[]", "1" + "0" * 30]
BAD_TIMEOUTS = ["-1", "NaN", "Infinity", "-Infinity", "1e999", '"x"', '"5"', "true", "[1]", "1" + "0" * 400]


@STREAM
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "value"),
    [*(("priority", value) for value in BAD_PRIORITIES), *(("timeout_s", value) for value in BAD_TIMEOUTS)],
    ids=lambda value: str(value)[:16],
)
def test_bad_http_values_name_their_field(path: str, name: str, value: str, stream: bool) -> None:
    world = DoorWorld([])
    reply = http(world, path, f'"{name}": {value}', stream=stream)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (name, "invalid_request")
    assert name in error["message"]


@STREAM
@pytest.mark.parametrize("left_s", [None, 5.0], ids=["no deadline", "deadline"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", -(2**31)),
        ("timeout_s", -1.0),
        ("timeout_s", float("nan")),
        ("timeout_s", float("inf")),
        ("timeout_s", float("-inf")),
    ],
)
async def test_bad_grpc_values_name_their_field(name: str, value: Any, left_s: float | None, stream: bool) -> None:
    message = pb.GenerateRequest(text="hi", **{name: value})
    context = await refused_rpc(DoorWorld([]), message, TimedContext(left_s=left_s), stream=stream)
    assert context.code is CODE.INVALID_ARGUMENT
    assert name in context.details


@pytest.mark.parametrize("value", ["high", 2**40, 1.5])
def test_grpc_clients_cannot_even_write_other_priorities(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        pb.GenerateRequest(text="hi", priority=value)


# --- deadlines ---


class SlowTokenizer:
    """Tokenising takes some seconds of virtual time."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.now = 100.0
        self.calls = 0
        self.decode, self.is_silent = TOKENIZER.decode, TOKENIZER.is_silent
        self._seconds = seconds

    def clock(self) -> float:
        return self.now

    def encode(self, prompt: str, *, field: str) -> list[int]:
        self.calls += 1
        self.now += self._seconds
        return TOKENIZER.encode(prompt, field=field)


def slow_world(tokenizer: SlowTokenizer, attempts: list[Attempt]) -> DoorWorld:
    return DoorWorld(attempts, tokenizer=tokenizer, clock=tokenizer.clock)  # type: ignore[arg-type]


async def test_the_engine_is_told_what_tokenising_left() -> None:
    tokenizer = SlowTokenizer(4)
    world = slow_world(tokenizer, [Attempt("a", answer("ok"))])
    async for _ in world.door.generate(GenerationCall(text="hi", timeout_s=10)):
        pass
    assert world.request.timeout_s == 6


@pytest.mark.parametrize(("seconds", "timeout_s", "tokenised"), [(0, 0, 0), (10, 10, 1), (99, 10, 1)])
async def test_a_request_that_is_late_before_its_dispatch_costs_no_replica_anything(
    seconds: float, timeout_s: float, tokenised: int
) -> None:
    tokenizer = SlowTokenizer(seconds)
    world = slow_world(tokenizer, [])
    with pytest.raises(DeadlineExceeded, match=f"the deadline of {timeout_s} s passed"):
        await anext(world.door.generate(GenerationCall(text="hi", timeout_s=timeout_s)))
    assert (tokenizer.calls, world.dispatcher.used, world.live()) == (tokenised, [], 0)


async def test_nobody_waits_for_a_tokenizer_beyond_the_deadline() -> None:
    class Stuck(SlowTokenizer):
        def encode(self, prompt: str, *, field: str) -> list[int]:
            freed.wait(60)
            return TOKENIZER.encode(prompt, field=field)

    freed, world = threading.Event(), slow_world(Stuck(), [])
    try:
        with pytest.raises(DeadlineExceeded, match=r"0\.03 s"):
            await anext(world.door.generate(GenerationCall(text="hi", timeout_s=0.03)))
    finally:
        freed.set()
    assert world.dispatcher.used == []


LATE: list[tuple[str, list[Step]]] = [
    ("the router's timer", [HANG]),
    ("the engine", [DeadlineExceeded("0.1971 s have passed in the queue", worker_id="a")]),
]
WHO = pytest.mark.parametrize("steps", [steps for _, steps in LATE], ids=[name for name, _ in LATE])


@WHO
@STREAM
@pytest.mark.parametrize("path", PATHS)
def test_a_late_http_answer_is_504_whoever_notices(path: str, steps: list[Step], stream: bool) -> None:
    world = DoorWorld([Attempt("a", steps)])
    reply = http(world, path, '"timeout_s": 0.2', stream=stream)
    error = {
        "message": "the deadline of 0.2 s passed",
        "type": "timeout_error",
        "param": None,
        "code": "deadline_exceeded",
    }
    assert (reply.status_code, reply.json()) == (504, {"error": error})
    assert (len(world.dispatcher.used), world.live()) == (1, 0)


@WHO
def test_an_http_stream_that_becomes_late_ends_with_the_same_error(steps: list[Step]) -> None:
    world = DoorWorld([Attempt("a", [delta("x"), *steps])])
    frames = http(world, "/v1/completions", '"timeout_s": 0.2', stream=True).text.split("\n\n")
    assert json.loads(frames[0][6:])["choices"][0]["text"] == "x"
    error = json.loads(frames[-2][6:])["error"]
    assert (error["code"], error["message"]) == ("deadline_exceeded", "the deadline of 0.2 s passed")
    assert world.live() == 0


@WHO
@STREAM
@pytest.mark.parametrize("before", ["", "x"], ids=["before the first token", "after it"])
async def test_a_late_grpc_answer_is_deadline_exceeded_whoever_notices(
    steps: list[Step], before: str, stream: bool
) -> None:
    world = DoorWorld([Attempt("a", [*map(delta, before), *steps])])
    message = pb.GenerateRequest(text="hi", timeout_s=0.2)
    context = await refused_rpc(world, message, Context(), stream=stream)
    assert (context.code, context.details) == (CODE.DEADLINE_EXCEEDED, "the deadline of 0.2 s passed")
    assert (len(world.dispatcher.used), world.live()) == (1, 0)


@STREAM
def test_an_http_request_without_any_time_is_not_dispatched(stream: bool) -> None:
    world = DoorWorld([])
    assert http(world, "/v1/completions", '"timeout_s": 0', stream=stream).status_code == 504
    assert world.dispatcher.used == []


@STREAM
@pytest.mark.parametrize(("timeout_s", "left_s"), [(0.0, None), (None, -0.5), (9.0, -0.5)])
async def test_a_grpc_call_without_any_time_is_not_dispatched(
    timeout_s: float | None, left_s: float | None, stream: bool
) -> None:
    world, message = DoorWorld([]), pb.GenerateRequest(text="hi", timeout_s=timeout_s)
    context = await refused_rpc(world, message, TimedContext(left_s=left_s), stream=stream)
    assert context.code is CODE.DEADLINE_EXCEEDED
    assert world.dispatcher.used == []


# --- overload ---


def full(worker: str, hint: float) -> Attempt:
    return Attempt(worker, [Overloaded("128 requests wait already", retry_after_s=hint, worker_id=worker)])


@STREAM
@pytest.mark.parametrize("path", PATHS)
def test_a_full_cluster_says_over_http_when_to_come_back(path: str, stream: bool) -> None:
    world = DoorWorld([full("a", 3.0), full("b", 12.3)])
    reply = http(world, path, '"priority": 9', stream=stream)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "13")
    error = reply.json()["error"]
    assert (error["message"], error["code"]) == ("128 requests wait already", "overloaded")
    assert [hint.exclude for hint in world.hints] == [frozenset(), {"a"}]
    assert world.live() == 0


@STREAM
async def test_a_full_cluster_says_over_grpc_when_to_come_back(stream: bool) -> None:
    world = DoorWorld([full("a", 3.0), full("b", 12.3)])
    context = await refused_rpc(world, pb.GenerateRequest(text="hi"), Context(), stream=stream)
    assert (context.code, context.details) == (CODE.RESOURCE_EXHAUSTED, "128 requests wait already")
    assert context.trailing == [("retry-after", "13")]


@STREAM
def test_one_full_replica_is_not_the_clients_concern(stream: bool) -> None:
    world = DoorWorld([full("a", 12.3), Attempt("b", answer("ok"))])
    reply = http(world, "/v1/completions", '"priority": -1', stream=stream)
    assert (reply.status_code, reply.headers["x-kvray-replica"]) == (200, "b")
    assert [attempt.request and attempt.request.priority for attempt in world.dispatcher.used] == [-1, -1]
