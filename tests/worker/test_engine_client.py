"""EngineClient over a port that the test plays: who gets which delta, what is cancelled, and how the end is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import cast

import fake_engine as fakes
import pytest

from cluster.core.errors import ConfigError, KvrayError, Overloaded, ReplicaLost
from cluster.core.replica import ReplicaLoad
from cluster.core.request import FinishReason, GenerationRequest, TokenDelta
from cluster.core.sampling import SamplingParams
from worker.engine_client import EngineClient
from worker.engine_port import EngineSink
from worker.engine_thread import ThreadEnginePort
from worker.frame import EngineCommand, EngineFrame
from worker.runner import ModelFacts

FACTS = fakes.make_fake_engine().runner.facts


class FakePort:
    """EnginePort without an engine. `sent` is what the client wanted; `frame` and `exit` are what it hears."""

    def __init__(self) -> None:
        self.sent: list[EngineCommand] = []
        self.alive = True
        self.broken = False
        self.start_error: KvrayError | None = None
        self.sink: EngineSink | None = None
        self.start_thread: int | None = None

    def start(self, sink: EngineSink) -> ModelFacts:
        self.start_thread = threading.get_ident()
        if self.start_error is not None:
            raise self.start_error
        self.sink = sink
        return FACTS

    def send(self, command: EngineCommand) -> None:
        if self.broken:
            raise ReplicaLost("the engine process is gone")
        self.sent.append(command)

    def close(self) -> None:
        if self.alive:
            self.alive = False
            self.exit("closed")

    def frame(self, *deltas: TokenDelta, load: ReplicaLoad | None = None) -> None:
        assert self.sink is not None
        self.sink.on_frame(EngineFrame(deltas, (), load or ReplicaLoad()))

    def exit(self, reason: str) -> None:
        assert self.sink is not None
        self.alive = False
        self.sink.on_exit(reason)

    @property
    def cancelled(self) -> list[str | None]:
        return [c.cancel for c in self.sent if c.add is None]


def request(request_id: str) -> GenerationRequest:
    return GenerationRequest(request_id=request_id, prompt_token_ids=(1, 2), sampling=SamplingParams())


def delta(request_id: str, *tokens: int, last: bool = False) -> TokenDelta:
    reason = FinishReason.LENGTH if last else None
    return TokenDelta(request_id=request_id, token_ids=tokens, finish_reason=reason)


async def collect(client: EngineClient, request_id: str) -> list[int]:
    return [token async for d in client.generate(request(request_id)) for token in d.token_ids]


def stream(client: EngineClient, request_id: str) -> AsyncGenerator[TokenDelta, None]:
    return cast(AsyncGenerator[TokenDelta, None], client.generate(request(request_id)))


async def turn() -> None:
    """Let everything that is ready run: tasks up to their next wait, and what the port posted."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def port() -> FakePort:
    return FakePort()


@pytest.fixture
async def client(port: FakePort) -> EngineClient:
    client = EngineClient(port)
    assert await client.start() == FACTS
    return client


async def test_start_does_not_hold_up_the_loop(port: FakePort, client: EngineClient) -> None:
    assert port.start_thread not in (None, threading.get_ident())


async def test_start_errors_keep_their_type(port: FakePort) -> None:
    port.start_error = ConfigError("no such model")
    with pytest.raises(ConfigError, match="no such model"):
        await EngineClient(port).start()


async def test_concurrent_streams_get_their_own_deltas_in_order(port: FakePort, client: EngineClient) -> None:
    tasks = {name: asyncio.create_task(collect(client, name)) for name in "abc"}
    await turn()
    assert [c.add.request_id for c in port.sent if c.add is not None] == ["a", "b", "c"]
    port.frame(delta("a", 1), delta("c", 7, 8))
    port.frame(delta("b", 4), delta("a", 2), delta("nobody", 99))
    port.frame(delta("a", 3, last=True), delta("c", last=True))
    port.frame(delta("b", 5, last=True))
    assert {name: await task for name, task in tasks.items()} == {"a": [1, 2, 3], "b": [4, 5], "c": [7, 8]}
    assert port.cancelled == []
    assert client._streams == {}


async def test_frames_from_another_thread_reach_the_loop(port: FakePort, client: EngineClient) -> None:
    task = asyncio.create_task(collect(client, "a"))
    await turn()
    await asyncio.to_thread(port.frame, delta("a", 5, 6, last=True))
    assert await task == [5, 6]


async def test_a_refusal_raises_its_typed_error_and_sends_no_cancel(port: FakePort, client: EngineClient) -> None:
    task = asyncio.create_task(collect(client, "a"))
    await turn()
    port.frame(TokenDelta(request_id="a", error=Overloaded("full", retry_after_s=2.0)))
    with pytest.raises(Overloaded) as caught:
        await task
    assert caught.value.retry_after_s == 2.0
    assert port.cancelled == []
    assert client._streams == {}


async def test_closing_the_generator_cancels_the_request(port: FakePort, client: EngineClient) -> None:
    answer = stream(client, "a")
    other = asyncio.create_task(collect(client, "b"))
    first = asyncio.create_task(anext(answer))
    await turn()
    port.frame(delta("a", 1))
    assert (await first).token_ids == (1,)
    await answer.aclose()
    assert port.cancelled == ["a"]
    assert list(client._streams) == ["b"]
    port.frame(delta("a", 2), delta("b", 3, last=True))
    assert await other == [3]


async def test_cancelling_a_task_that_waits_cancels_the_request(port: FakePort, client: EngineClient) -> None:
    task = asyncio.create_task(collect(client, "a"))
    await turn()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert port.cancelled == ["a"]


async def test_a_generator_that_was_never_begun_sends_nothing(port: FakePort, client: EngineClient) -> None:
    await stream(client, "a").aclose()
    assert port.sent == []


async def test_death_of_the_engine_ends_every_stream_and_refuses_new_ones(port: FakePort) -> None:
    reasons: list[str] = []
    client = EngineClient(port, on_exit=reasons.append)
    await client.start()
    tasks = [asyncio.create_task(collect(client, name)) for name in "ab"]
    await turn()
    port.frame(delta("a", 1))
    assert client.alive
    port.exit("engine process 7 ended")
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, ReplicaLost)
        assert "engine process 7 ended" in result.message
    assert not client.alive
    assert reasons == ["engine process 7 ended"]
    assert port.cancelled == []
    with pytest.raises(ReplicaLost, match="engine process 7 ended"):
        await collect(client, "c")
    assert len(port.sent) == 2
    assert client._streams == {}


async def test_tokens_that_came_before_the_death_are_delivered(port: FakePort, client: EngineClient) -> None:
    answer = stream(client, "a")
    first = asyncio.create_task(anext(answer))
    await turn()
    port.frame(delta("a", 1))
    port.frame(delta("a", 2))
    port.exit("gone")
    assert (await first).token_ids == (1,)
    assert (await anext(answer)).token_ids == (2,)
    with pytest.raises(ReplicaLost):
        await anext(answer)


async def test_a_send_that_fails_raises_and_leaves_no_queue(port: FakePort, client: EngineClient) -> None:
    port.broken = True
    with pytest.raises(ReplicaLost, match="process is gone"):
        await collect(client, "a")
    assert client._streams == {}


async def test_leaving_a_stream_while_the_engine_dies_raises_nothing(port: FakePort, client: EngineClient) -> None:
    """The process is gone, but nobody has noticed yet: the cancel cannot be sent, and need not be."""
    answer = stream(client, "a")
    first = asyncio.create_task(anext(answer))
    await turn()
    port.frame(delta("a", 1))
    await first
    port.broken = True
    await answer.aclose()
    assert client._streams == {}


async def test_every_frame_is_observed_and_the_newest_load_kept(port: FakePort) -> None:
    frames: list[EngineFrame] = []
    client = EngineClient(port, on_frame=frames.append)
    await client.start()
    port.frame(load=ReplicaLoad(running=1))
    port.frame(load=ReplicaLoad(running=2))
    await turn()
    assert [f.load.running for f in frames] == [1, 2]
    assert client.load.running == 2


async def test_closing_ends_open_streams_and_is_not_reported_as_a_death(port: FakePort) -> None:
    reasons: list[str] = []
    client = EngineClient(port, on_exit=reasons.append)
    await client.start()
    task = asyncio.create_task(collect(client, "a"))
    await turn()
    await client.close()
    with pytest.raises(ReplicaLost):
        await task
    assert not client.alive
    assert reasons == []
    await client.close()


def test_what_the_engine_says_after_the_loop_closed_is_dropped(port: FakePort) -> None:
    async def begin() -> EngineClient:
        client = EngineClient(port)
        await client.start()
        return client

    client = asyncio.run(begin())
    port.frame(delta("a", 1), load=ReplicaLoad(running=5))
    port.exit("gone")
    assert client.load.running == 0


async def test_over_a_real_engine_many_streams_get_the_answers_they_would_get_alone() -> None:
    fake = fakes.make_fake_engine(num_blocks=64, max_num_seqs=4)
    client = EngineClient(ThreadEnginePort(lambda: (fake.engine, fake.runner.facts)))
    await client.start()
    prompts = {f"r{n}": [1, 2, 3, 4, 5, n] for n in range(12)}
    commands = {name: fake.command(name, prompt, 7) for name, prompt in prompts.items()}

    async def answer(name: str) -> list[int]:
        added = commands[name].add
        assert added is not None
        return [token async for d in client.generate(added) for token in d.token_ids]

    answers = await asyncio.gather(*(answer(name) for name in prompts))
    assert answers == [fakes.expected_answer(prompt, 7) for prompt in prompts.values()]
    await client.close()


async def test_before_its_first_step_an_engine_has_all_its_blocks() -> None:
    """A replica registers with this load; a pool of 0 blocks would tell status readers nonsense."""
    client = EngineClient(FakePort())
    facts = await client.start()
    assert (client.load.free_blocks, client.load.total_blocks) == (facts.num_blocks, facts.num_blocks)
