"""The token channel over real sockets, without Ray: a replica's service and a router's dispatcher.

A fake handle joins them. The fake Serve call runs the replica's generator in the same event loop; everything about
sockets is real.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, cast

import msgpack
import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve.handle import DeploymentHandle

from cluster.core.errors import Overloaded, ReplicaLost
from cluster.core.logprobs import TokenLogprob
from cluster.core.replica import ReplicaLoad, WorkerId
from cluster.core.request import FinishReason, GenerationRequest, TokenDelta
from cluster.core.sampling import SamplingParams
from cluster.token_channel import MAX_BUFFER_BYTES, MAX_MESSAGE_BYTES, PROTOCOL, ChannelOffer, delta_to_wire
from router.route_ledger import RouteLedger
from router.routing_state import NO_EPOCH, RouteHint
from router.serve_dispatcher import ServeDispatcher
from router.token_channels import TokenChannels
from worker.engine_client import EngineClient
from worker.engine_port import EngineSink
from worker.frame import EngineCommand, EngineFrame
from worker.request_gate import MAX_PROMPT_LOGPROBS
from worker.request_service import RequestService
from worker.runner import ModelFacts
from worker.token_channel_server import TokenChannelServer

FACTS = cast(ModelFacts, type("Facts", (), {"num_blocks": 1})())
W = WorkerId("w")


class PlayedPort:
    """EnginePort that the test plays."""

    def __init__(self) -> None:
        self.sent: list[EngineCommand] = []
        self.alive = True

    def start(self, sink: EngineSink) -> ModelFacts:
        self.sink = sink
        return FACTS

    def send(self, command: EngineCommand) -> None:
        if not self.alive:
            raise ReplicaLost("the engine process is gone")
        self.sent.append(command)

    def close(self) -> None:
        self.alive = False

    def step(self, *deltas: TokenDelta) -> None:
        self.sink.on_frame(EngineFrame(deltas, (), ReplicaLoad()))

    @property
    def added(self) -> list[str]:
        return [c.add.request_id for c in self.sent if c.add is not None]

    @property
    def cancelled(self) -> list[str | None]:
        return [c.cancel for c in self.sent if c.add is None]


class FakeCall:
    """What `handle.remote()` returns: the replica's items, until it is cancelled or the replica dies."""

    def __init__(self, items: AsyncGenerator[bytes, None]) -> None:
        self._items = items
        self._queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())
        self.passed: list[bytes] = []

    async def _run(self) -> None:
        try:
            async with aclosing(self._items) as items:
                async for item in items:
                    self._queue.put_nowait(item)
        finally:
            self._queue.put_nowait(None)

    def cancel(self) -> None:
        self._task.cancel()

    def die(self, error: Exception) -> None:
        self._queue.put_nowait(error)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        if item is None:
            raise StopAsyncIteration
        self.passed.append(item)
        return item


class Replica:
    """A replica without Ray; also the handle that routers call."""

    def __init__(self, **limits: int) -> None:
        self.port = PlayedPort()
        self.engine = EngineClient(self.port)
        self.server = TokenChannelServer("w", **limits)
        self.service = RequestService(self.engine, self.server)
        self.calls: list[FakeCall] = []

    async def start(self, host: str = "127.0.0.1") -> Replica:
        await self.engine.start()
        await self.server.start(host)
        return self

    def options(self, **_: Any) -> Replica:
        return self

    def remote(self, payload: bytes, **_: Any) -> FakeCall:
        self.calls.append(FakeCall(self.service.answer(payload)))
        return self.calls[-1]

    def step(self, *deltas: TokenDelta) -> None:
        self.port.step(*deltas)


class Router:
    def __init__(self, replica: Replica, router_id: str) -> None:
        self.replica, self.router_id = replica, router_id
        self.ledger = RouteLedger()
        self.channels = TokenChannels(router_id)
        self.dispatcher = ServeDispatcher(cast(DeploymentHandle, replica), self.ledger, self.channels)

    async def connect(self) -> Router:
        assert self.replica.server.offer is not None
        self.channels.learn(W, self.replica.server.offer)
        await until(lambda: bool(self.channels.connected))
        return self

    def stream(self, name: str, *, whole: bool = False) -> AsyncGenerator[tuple[WorkerId, TokenDelta], None]:
        request = GenerationRequest(
            request_id=name, prompt_token_ids=(1, 2), sampling=SamplingParams(), router_id=self.router_id
        )
        self.ledger.book(name, W, NO_EPOCH, 2)
        hint = RouteHint(request_id=name, chunk_hashes=(), prompt_tokens=2)
        return self.dispatcher.dispatch(request, hint, whole=whole)

    def ask(self, name: str, *, whole: bool = False) -> asyncio.Task[list[tuple[int, ...]]]:
        async def collect() -> list[tuple[int, ...]]:
            async with aclosing(self.stream(name, whole=whole)) as deltas:
                return [delta.token_ids async for _, delta in deltas]

        return asyncio.create_task(collect())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def delta(name: str, *tokens: int, last: bool = False, **more: Any) -> TokenDelta:
    reason = FinishReason.LENGTH if last else None
    return TokenDelta(request_id=name, token_ids=tokens, finish_reason=reason, **more)


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    replica = await Replica().start()
    yield replica
    await replica.server.close()


@pytest.fixture
async def router(replica: Replica) -> AsyncIterator[Router]:
    router = await Router(replica, "me").connect()
    yield router
    await router.channels.close()


def through_serve(replica: Replica) -> list[list[Any]]:
    return [msgpack.unpackb(item) for call in replica.calls for item in call.passed]


async def test_tokens_go_over_the_channel_and_the_call_stays_silent(replica: Replica, router: Router) -> None:
    tasks = {name: router.ask(name) for name in "ab"}
    await until(lambda: replica.port.added == ["a", "b"])
    replica.step(delta("a", 1, cached_tokens=0), delta("b", 4))
    replica.step(delta("a", 2), delta("b", 5, last=True))
    replica.step(delta("a", 3, last=True))
    assert await tasks["a"] == [(1,), (2,), (3,)]
    assert await tasks["b"] == [(4,), (5,)]
    await until(lambda: len(through_serve(replica)) == 2)
    assert through_serve(replica) == [["w", None, None]] * 2
    assert replica.port.cancelled == []
    assert router.channels._calls == {}
    await until(lambda: not router.dispatcher._readers)


async def test_a_step_is_one_message_for_each_router(
    replica: Replica, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[list[Any]] = []
    deliver = router.channels.deliver

    def listen(worker_id: WorkerId, deltas: list[list[Any]]) -> None:
        messages.append(deltas)
        deliver(worker_id, deltas)

    monkeypatch.setattr(router.channels, "deliver", listen)
    other = await Router(replica, "other").connect()
    tasks = [router.ask("a"), router.ask("b"), other.ask("c")]
    await until(lambda: len(replica.port.added) == 3)
    replica.step(delta("a", 1), delta("b", 2), delta("c", 3))
    await until(lambda: len(messages) == 1)
    replica.step(delta("c", 6, last=True), delta("a", 4, last=True), delta("b", 5, last=True))
    assert [await task for task in tasks] == [[(1,), (4,)], [(2,), (5,)], [(3,), (6,)]]
    assert [[wire[1] for wire in message] for message in messages] == [[[1], [2]], [[4], [5]]]
    await other.channels.close()


async def test_the_first_answer_comes_through_serve_and_brings_the_offer(replica: Replica) -> None:
    router = Router(replica, "me")
    first = router.ask("a")
    await until(lambda: replica.port.added == ["a"])
    replica.step(delta("a", 1))
    await until(lambda: bool(router.channels.connected))
    replica.step(delta("a", 2, last=True))
    assert await first == [(1,), (2,)]
    offers = [item[2] for item in through_serve(replica)]
    assert replica.server.offer is not None
    assert offers == [replica.server.offer.to_wire(), None]
    second = router.ask("b")
    await until(lambda: len(replica.port.added) == 2)
    replica.step(delta("b", 3, last=True))
    assert await second == [(3,)]
    await until(lambda: len(through_serve(replica)) == 3)
    assert through_serve(replica)[-1] == ["w", None, None]
    await router.channels.close()


async def test_without_abstract_sockets_routers_connect_over_tcp(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = replica.server.offer
    assert offer is not None
    router = Router(replica, "me")
    router.channels.learn(W, ChannelOffer(unix="elsewhere", host=offer.host, port=offer.port, secret=offer.secret))
    await until(lambda: bool(router.channels.connected))
    task = router.ask("a")
    await until(lambda: replica.port.added == ["a"])
    replica.step(delta("a", 1, last=True))
    assert await task == [(1,)]
    assert through_serve(replica) in ([], [["w", None, None]])
    await router.channels.close()


async def test_a_channel_that_cannot_be_opened_costs_one_warning_and_no_token(
    replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        replica.server.offer = ChannelOffer(unix="nobody", host="127.0.0.1", port=taken.getsockname()[1], secret="x")
        router = Router(replica, "me")
        for name in ("a", "b"):
            task = router.ask(name)
            await until(lambda wanted=name: wanted in replica.port.added)  # type: ignore[misc]
            replica.step(delta(name, 1))
            await until(lambda: not router.channels._tasks)
            replica.step(delta(name, 2, last=True))
            assert await task == [(1,), (2,)]
    assert [r.levelno for r in caplog.records if "token channel" in r.getMessage()] == [logging.WARNING]


async def test_a_wrong_secret_is_refused_and_learns_nothing(replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    offer = replica.server.offer
    assert offer is not None
    wrong = (
        msgpack.packb([PROTOCOL, offer.secret[:-1] + "x", "me"]),
        msgpack.packb([PROTOCOL, "é", "me"]),
        msgpack.packb(["other", offer.secret, "me"]),
        msgpack.packb({"secret": offer.secret}),
        b"\xc1" * 10,
        msgpack.packb("x" * 10_000),
    )
    for hello in wrong:
        reader, writer = await asyncio.open_connection(offer.host, offer.port)
        writer.write(hello)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
    assert replica.server.sink("me", 1) is None
    assert not replica.server._connections


async def test_nobody_is_told_who_says_nothing(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.token_channel_server.HANDSHAKE_TIMEOUT_S", 0.05)
    offer = replica.server.offer
    assert offer is not None
    reader, writer = await asyncio.open_connection(offer.host, offer.port)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), 5)
    writer.close()


async def test_a_router_that_does_not_read_loses_its_own_requests_only() -> None:
    replica = await Replica(max_buffer_bytes=100_000).start()
    router = await Router(replica, "me").connect()
    offer = replica.server.offer
    assert offer is not None
    _, writer = await asyncio.open_connection(offer.host, offer.port, limit=1)  # reads nothing more once this is full
    writer.write(msgpack.packb([PROTOCOL, offer.secret, "slow"]))
    await until(lambda: replica.server.sink("slow", 1) is not None)
    slow = Router(replica, "slow").ask("s")
    good = router.ask("g")
    await until(lambda: len(replica.port.added) == 2)
    for step in range(400):
        replica.step(delta("s", *range(10_000)), delta("g", step))
        await asyncio.sleep(0)
        if replica.port.cancelled:
            break
    assert replica.port.cancelled == ["s"], "the engine goes on for nobody"
    with pytest.raises(ReplicaLost) as caught:
        await slow
    assert caught.value.details["dead"] is False
    replica.step(delta("g", 9, last=True))
    assert (await good)[-1] == (9,)
    writer.close()
    await router.channels.close()
    await replica.server.close()


async def test_a_router_that_lost_its_connection_connects_again(replica: Replica, router: Router) -> None:
    answer = router.stream("a")
    first = asyncio.ensure_future(anext(answer))
    await until(lambda: replica.port.added == ["a"])
    replica.step(delta("a", 1))
    assert (await first)[1].token_ids == (1,)
    next(iter(router.channels._links.values()))._transport.abort()
    with pytest.raises(ReplicaLost) as caught:
        await anext(answer)
    assert caught.value.details == {"dead": False, "worker_id": "w"}
    assert replica.port.cancelled == ["a"]
    again = router.ask("b")
    await until(lambda: "b" in replica.port.added)
    replica.step(delta("b", 1))
    await until(lambda: bool(router.channels.connected))
    replica.step(delta("b", 2, last=True))
    assert await again == [(1,), (2,)]


async def test_the_replica_dies_after_tokens_and_serve_says_so(replica: Replica, router: Router) -> None:
    answer = router.stream("a")
    first = asyncio.ensure_future(anext(answer))
    await until(lambda: replica.port.added == ["a"])
    replica.step(delta("a", 1))
    assert (await first)[1].token_ids == (1,)
    replica.step(delta("a", 2))
    await until(lambda: bool(next(iter(router.channels._calls.values()))._deltas))
    for connection in list(replica.server._connections):
        connection._transport.abort()
    await until(lambda: not router.channels.connected)
    replica.calls[0].die(ActorUnavailableError("gone", b"\0" * 16))
    assert (await anext(answer))[1].token_ids == (2,)
    with pytest.raises(ReplicaLost) as caught:
        await anext(answer)
    assert caught.value.details["worker_id"] == "w"


async def test_a_channel_that_breaks_while_serve_says_nothing_ends_the_call(
    replica: Replica, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = router.stream("a")
    first = asyncio.ensure_future(anext(answer))
    await until(lambda: replica.port.added == ["a"])
    call = next(iter(router.channels._calls.values()))
    monkeypatch.setattr(call, "_grace_s", 0.05)
    replica.step(delta("a", 1))
    await first
    call.channel_broke(W)
    with pytest.raises(ReplicaLost) as caught:
        await anext(answer)
    assert caught.value.details == {"dead": False, "worker_id": "w"}
    await until(lambda: replica.port.cancelled == ["a"])


async def test_the_end_of_the_call_may_overtake_the_last_tokens(replica: Replica, router: Router) -> None:
    task = router.ask("a")
    await until(lambda: replica.port.added == ["a"])
    call = next(iter(router.channels._calls.values()))
    call.answered()
    call.over()
    await asyncio.sleep(0.01)
    assert not task.done()
    replica.step(delta("a", 1), delta("a", 2, last=True))
    assert await task == [(1,), (2,)]


async def test_leaving_early_cancels_the_request(replica: Replica, router: Router) -> None:
    answer = router.stream("a")
    first = asyncio.ensure_future(anext(answer))
    await until(lambda: replica.port.added == ["a"])
    replica.step(delta("a", 1))
    await first
    await answer.aclose()
    await until(lambda: replica.port.cancelled == ["a"])
    replica.step(delta("a", 2))  # late, for nobody
    await until(lambda: not router.dispatcher._readers)
    waiting = router.ask("b")
    await until(lambda: "b" in replica.port.added)
    waiting.cancel()
    await until(lambda: replica.port.cancelled == ["a", "b"])
    await until(lambda: not any(connection.sinks for connection in replica.server._connections))


@pytest.mark.parametrize("way", ["channel", "serve"])
async def test_errors_keep_their_type(replica: Replica, way: str) -> None:
    router = Router(replica, "me")
    if way == "channel":
        await router.connect()
    task = router.ask("a")
    await until(lambda: replica.port.added == ["a"])
    replica.step(TokenDelta(request_id="a", error=Overloaded("full", retry_after_s=2.0)))
    with pytest.raises(Overloaded) as caught:
        await task
    assert caught.value.details == {"retry_after_s": 2.0, "worker_id": "w"}
    assert replica.port.cancelled == []
    await router.channels.close()


async def test_the_death_of_the_engine_reaches_the_router(replica: Replica, router: Router) -> None:
    task = router.ask("a")
    await until(lambda: replica.port.added == ["a"])
    replica.port.alive = False
    replica.port.sink.on_exit("engine process 7 ended")
    with pytest.raises(ReplicaLost, match="engine process 7 ended") as caught:
        await task
    assert caught.value.details == {"worker_id": "w"}
    with pytest.raises(ReplicaLost, match="engine process 7 ended"):
        await router.ask("b")
    assert not any(connection.sinks for connection in replica.server._connections)


async def test_a_whole_answer_comes_in_few_pieces(replica: Replica, router: Router) -> None:
    task = router.ask("a", whole=True)
    await until(lambda: replica.port.added == ["a"])
    for token in range(100):
        replica.step(delta("a", token, cached_tokens=7 if token == 0 else None, last=token == 99))
    pieces = await task
    assert [token for piece in pieces for token in piece] == list(range(100))
    assert [len(piece) for piece in pieces] == [1, 64, 35]


def test_a_dozen_of_the_longest_scored_prompts_fit_into_one_message() -> None:
    top = tuple((100_000 + place, -1.5) for place in range(20))
    scored = (None, *[TokenLogprob(-2.5, top)] * (MAX_PROMPT_LOGPROBS // 21))
    size = len(msgpack.packb(delta_to_wire(1, TokenDelta(request_id="r", token_ids=(1,), prompt_logprobs=scored))))
    assert 12 * size < MAX_BUFFER_BYTES < MAX_MESSAGE_BYTES
