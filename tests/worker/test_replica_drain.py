"""A replica that Serve stops: answers end within the limit, new requests are refused, and then it leaves the index."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import fake_engine as fakes
import pytest
from virtual_loop import VirtualLoop

from cluster.core.errors import KvrayError, Overloaded, ReplicaLost
from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from worker.engine_client import EngineClient
from worker.engine_thread import ThreadEnginePort
from worker.frame import EngineFrame
from worker.replica_drain import POLL_S, ReplicaDrain


class SlowEngine:
    """Its answers end `takes_s` after the drain begins; what happens is noted with the time."""

    def __init__(self, takes_s: float, error: Exception | None = None) -> None:
        self.takes_s, self.error = takes_s, error
        self.notes: list[tuple[str, float]] = []
        self.stopping = False

    def note(self, what: str) -> None:
        self.notes.append((what, asyncio.get_running_loop().time() - 1_000_000.0))

    async def drain(self) -> None:
        self.note("drain")
        await asyncio.sleep(self.takes_s)
        if self.error is not None:
            raise self.error

    def end_all(self, error: KvrayError) -> int:
        assert isinstance(error, ReplicaLost) and error.details["dead"] is False
        self.note("cut off")
        return 2

    async def leave(self) -> None:
        self.note("leave")


def in_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)


@pytest.mark.parametrize(
    "takes_s,error,notes",
    [
        (3.0, None, [("drain", 5.0), ("leave", 8.0)]),
        (60.0, None, [("drain", 5.0), ("cut off", 15.0), ("leave", 15.0)]),
        (2.0, ReplicaLost("out of memory"), [("drain", 5.0), ("leave", 7.0)]),
    ],
    ids=["in time", "too late", "dead"],
)
def test_the_order(takes_s: float, error: Exception | None, notes: list[tuple[str, float]]) -> None:
    engine = SlowEngine(takes_s, error)

    async def stop_after_5_s() -> None:
        drain = ReplicaDrain(engine, lambda: engine.stopping, engine.leave, 10.0)
        task = asyncio.create_task(drain.run())
        await asyncio.sleep(5.0 - POLL_S / 2)
        assert engine.notes == []
        engine.stopping = True
        await task

    in_virtual_time(stop_after_5_s())
    assert engine.notes == notes


def test_without_a_limit_nothing_is_waited_for() -> None:
    engine = SlowEngine(60.0)
    in_virtual_time(ReplicaDrain(engine, lambda: True, engine.leave, 0.0).run())
    assert [what for what, _ in engine.notes][-2:] == ["cut off", "leave"] and engine.notes[-1][1] == 0.0


class World:
    """A client on a real loop and an engine on its thread, as in a replica."""

    def __init__(self) -> None:
        self.fake = fakes.make_fake_engine()
        self.draining = asyncio.Event()
        port = ThreadEnginePort(lambda: (self.fake.engine, self.fake.runner.facts))
        self.client = EngineClient(port, on_frame=self.see)
        self.left = asyncio.Event()

    def see(self, frame: EngineFrame) -> None:
        if frame.load.draining:
            self.draining.set()

    async def leave(self) -> None:
        self.left.set()

    async def answer(self, name: str, tokens: int) -> list[int]:
        prompt = [1, 2, 3, 4, 5]
        self.fake.runner.histories[name] = list(prompt)
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
        request = GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling)
        return [token async for delta in self.client.generate(request) for token in delta.token_ids]


async def test_answers_end_newcomers_are_refused_and_the_load_says_draining() -> None:
    world = World()
    await world.client.start()
    world.client.pause()  # so that the answer is under way for as long as this test wants
    answer = asyncio.create_task(world.answer("a", 5))
    await asyncio.sleep(0)
    drain = asyncio.create_task(ReplicaDrain(world.client, lambda: True, world.leave, 60.0).run())
    await asyncio.wait_for(world.draining.wait(), 20)
    with pytest.raises(Overloaded):
        await asyncio.wait_for(world.answer("b", 5), 20)
    await asyncio.wait_for(drain, 20)
    assert await answer == fakes.expected_answer([1, 2, 3, 4, 5], 5) and world.left.is_set()
    with pytest.raises(Overloaded):
        await asyncio.wait_for(world.answer("c", 5), 20)
    await world.client.close()


async def test_what_is_not_complete_at_the_limit_is_cut_off_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    await world.client.start()
    gone = asyncio.Event()
    world.client._observe = lambda frame: gone.set() if not frame.load.running + frame.load.waiting else None

    async def endless() -> None:
        world.client.pause()
        await asyncio.Event().wait()

    monkeypatch.setattr(world.client, "drain", endless)
    world.client.pause()
    answers = [asyncio.create_task(world.answer(name, 50)) for name in "ab"]
    await asyncio.sleep(0)
    await asyncio.wait_for(ReplicaDrain(world.client, lambda: True, world.leave, 0.05).run(), 20)
    for answer in answers:
        with pytest.raises(ReplicaLost, match="send it again"):
            await asyncio.wait_for(answer, 20)
    await asyncio.wait_for(gone.wait(), 20)
    assert world.left.is_set() and world.client.end_all(ReplicaLost("again")) == 0
    await world.client.close()
    assert world.fake.engine.load().free_blocks == world.fake.engine.load().total_blocks
