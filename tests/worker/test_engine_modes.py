"""Pause, resume and drain: of the engine, of its loop while it sleeps, and of the client in front of it."""

from __future__ import annotations

import asyncio
import queue
import socket
import time
from typing import Any

import fake_engine as fakes
import pytest
from fake_grammar import FakePort
from scheduling_world import SchedulingWorld, VirtualClock

from cluster.core.constraint import Constraint
from cluster.core.errors import DeadlineExceeded, Overloaded, ReplicaLost
from cluster.core.request import FinishReason, GenerationRequest
from worker.engine_client import EngineClient
from worker.engine_loop import run_engine_loop
from worker.engine_thread import ThreadEnginePort
from worker.engine_wire import MessageSocket
from worker.frame import EngineCommand, EngineFrame, EngineMode
from worker.socket_commands import SocketCommands

A, B = list(range(1, 14)), list(range(100, 113))
REGEX = Constraint.regex("a+")
KINDS: list[dict[str, Any]] = [{}, {"n": 3, "seed": 2}, {"beam_width": 3}]


def paused(world: SchedulingWorld) -> bool:
    return world.fake.engine.load().paused


@pytest.mark.parametrize("options", KINDS, ids=["plain", "samples", "beams"])
@pytest.mark.parametrize("after", range(6))
def test_a_pause_at_any_step_changes_no_answer(after: int, options: dict[str, Any]) -> None:
    answers = []
    for pauses in (False, True):
        world = SchedulingWorld(token_budget=6)
        first = world.add(A, max_tokens=6, **options)
        world.steps(after)
        if pauses:
            world.mode(EngineMode.PAUSE)
            in_use, steps = world.in_use(), world.fake.runner.steps
            world.steps(5)
            assert (world.in_use(), world.fake.runner.steps) == (in_use, steps), "it keeps all and runs nothing"
            assert paused(world) and world.fake.engine.idle
        second = world.add(B, max_tokens=3)
        if pauses:
            world.steps(2)
            assert second in world.waiting
            world.mode(EngineMode.RESUME)
            assert not paused(world)
        world.finish()
        answers.append((world.fake.choices[first], world.fake.choices[second], world.fake.runner.steps))
        world.settled()
    assert answers[0] == answers[1]


def test_a_paused_engine_still_cancels_refuses_and_ends_what_is_late() -> None:
    world = SchedulingWorld(step_s=1.0, max_queue=2)
    running = world.add(A, max_tokens=20)
    world.steps(2)
    world.mode(EngineMode.PAUSE)
    late, queued = world.add(B, timeout_s=2.5), world.add([5, 6], max_tokens=2)
    refused = world.add([7])
    world.cancel(running)
    world.steps()
    assert world.last(running).finish_reason is FinishReason.CANCELLED and world.in_use() == 0
    assert isinstance(world.last(refused).error, Overloaded)
    world.steps(2)
    assert isinstance(world.last(late).error, DeadlineExceeded)
    assert world.fake.engine.idle and world.fake.engine.has_work
    world.mode(EngineMode.RESUME)
    world.finish()
    assert world.fake.answers[queued] == fakes.expected_answer([5, 6], 2)
    world.settled()


def test_a_grammar_that_comes_during_a_pause_waits_with_the_others() -> None:
    port = FakePort()
    world = SchedulingWorld(grammars=port)
    world.mode(EngineMode.PAUSE)
    request = world.add(A, max_tokens=2, constraint=REGEX)
    world.steps()
    port.compiled(REGEX)
    assert not world.fake.engine.idle
    world.steps()
    assert world.waiting == {request} and world.fake.engine.idle
    world.mode(EngineMode.RESUME)
    world.finish()
    assert world.fake.answers[request] == fakes.expected_answer(A, 2)


def test_a_drain_refuses_what_comes_and_finishes_what_is_there() -> None:
    port = FakePort()
    world = SchedulingWorld(max_num_seqs=1, grammars=port)
    accepted = [world.add(A, max_tokens=4), world.add(B, max_tokens=4), world.add([9], 2, constraint=REGEX)]
    world.steps()
    world.mode(EngineMode.DRAIN)
    refused = [world.add([1, 2]), world.add([1, 2], constraint=REGEX)]
    port.compiled(REGEX)
    world.finish()
    assert all(isinstance(world.last(one).error, Overloaded) for one in refused)
    assert [world.tokens(one) for one in accepted] == [4, 4, 2]
    world.mode(EngineMode.RESUME)
    again = world.add([1, 2], max_tokens=2)
    world.finish()
    assert world.tokens(again) == 2
    world.settled()


def test_a_drain_goes_on_from_a_pause() -> None:
    """Found here: a paused engine that was told to drain ran nothing and took nothing, and the drain never ended."""
    world = SchedulingWorld()
    request = world.add(A, max_tokens=4)
    world.mode(EngineMode.PAUSE)
    world.mode(EngineMode.DRAIN)
    world.finish(limit=20)
    assert world.tokens(request) == 4 and not paused(world)


def test_a_pause_during_a_drain_lets_nobody_in() -> None:
    world = SchedulingWorld()
    request = world.add(A, max_tokens=4)
    world.mode(EngineMode.DRAIN)
    world.mode(EngineMode.PAUSE)
    refused = world.add(B)
    world.steps(3)
    assert isinstance(world.last(refused).error, Overloaded) and world.tokens(request) == 0
    world.mode(EngineMode.DRAIN)
    world.finish(limit=20)
    assert world.tokens(request) == 4


@pytest.mark.parametrize("mode", list(EngineMode))
def test_modes_travel(mode: EngineMode) -> None:
    command = EngineCommand(mode=mode)
    assert EngineCommand.from_wire(command.to_wire()) == command
    assert EngineCommand.from_wire(EngineCommand(cancel="a").to_wire()).mode is None


class SleepingSource:
    """A CommandSource in virtual time: a wait for a deadline is a move of the clock."""

    def __init__(self, clock: VirtualClock, commands: list[EngineCommand]) -> None:
        self.clock, self.commands = clock, commands
        self.slept: list[float] = []

    def drain(self, *, wait: bool, timeout_s: float | None = None) -> list[EngineCommand] | None:
        if self.commands:
            return [self.commands.pop(0)]
        if wait:
            if timeout_s is None:
                return None
            self.slept.append(timeout_s)
            self.clock.now += timeout_s
        return []

    def wake(self) -> None:
        raise AssertionError("nothing wakes it but time")


@pytest.mark.parametrize("constrained", [False, True], ids=["paused", "compiling"])
def test_a_sleeping_loop_wakes_for_a_deadline(constrained: bool) -> None:
    clock = VirtualClock()
    fake = fakes.make_fake_engine(clock=clock, grammars=FakePort())
    options = {"constraint": REGEX} if constrained else {}
    commands = [EngineCommand(mode=EngineMode.PAUSE)] * (not constrained)
    commands += [fake.command(name, A, 4, timeout_s=at, **options) for name, at in (("b", 7.0), ("a", 3.0))]
    source, frames = SleepingSource(clock, commands), list[EngineFrame]()
    run_engine_loop(fake.engine, source, frames.append, clock)
    late = [(d.request_id, type(d.error)) for frame in frames for d in frame.deltas]
    assert late == [("a", DeadlineExceeded), ("b", DeadlineExceeded)]
    assert source.slept == [3.0, 4.0] and fake.runner.steps == 0


def test_a_wait_for_commands_ends_with_its_time() -> None:
    ours, theirs = (MessageSocket(end) for end in socket.socketpair())
    commands = SocketCommands(theirs)
    started = time.monotonic()
    assert commands.drain(wait=True, timeout_s=0.05) == []
    assert 0.04 <= time.monotonic() - started < 5.0
    assert commands.drain(wait=True, timeout_s=0.0) == []
    assert ours.write(EngineCommand(mode=EngineMode.PAUSE).to_wire())
    assert commands.drain(wait=True, timeout_s=60.0) == [EngineCommand(mode=EngineMode.PAUSE)]
    commands.close()
    ours.close()
    theirs.close()


def test_a_threads_wait_for_commands_ends_with_its_time() -> None:
    port = ThreadEnginePort(lambda: pytest.fail("it is not started"))
    assert port.drain(wait=True, timeout_s=0.0) == []
    assert port.drain(wait=True, timeout_s=0.02) == []
    port.wake()
    assert port.drain(wait=True, timeout_s=60.0) == [EngineCommand()]
    assert isinstance(port._commands, queue.SimpleQueue)


class ClientWorld:
    """A client over an engine on a thread."""

    def __init__(self, **options: Any) -> None:
        self.fake = fakes.make_fake_engine(64, **options)
        self.paused = asyncio.Event()
        self.client = EngineClient(ThreadEnginePort(lambda: (self.fake.engine, self.fake.runner.facts)), self._see)

    def _see(self, frame: EngineFrame) -> None:
        if frame.load.paused:
            self.paused.set()

    def request(self, name: str, prompt: list[int], max_tokens: int, **options: Any) -> GenerationRequest:
        added = self.fake.command(name, prompt, max_tokens, **options).add
        assert added is not None
        return added

    async def answer(self, request: GenerationRequest) -> list[int]:
        return [token async for delta in self.client.generate(request) for token in delta.token_ids]


@pytest.fixture
async def world() -> ClientWorld:
    world = ClientWorld()
    await world.client.start()
    return world


async def test_a_client_pauses_and_resumes(world: ClientWorld) -> None:
    world.client.pause()
    await asyncio.wait_for(world.paused.wait(), 20)
    tasks = [asyncio.create_task(world.answer(world.request(name, A, 9))) for name in "ab"]
    late = asyncio.create_task(world.answer(world.request("c", A, 9, timeout_s=0.05)))
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(late, 20)
    assert world.fake.runner.steps == 0 and not any(task.done() for task in tasks)
    world.client.resume()
    assert await asyncio.wait_for(asyncio.gather(*tasks), 20) == [fakes.expected_answer(A, 9)] * 2
    await world.client.close()


async def test_a_client_drains(world: ClientWorld) -> None:
    world.client.pause()
    tasks = [asyncio.create_task(world.answer(world.request(name, A, 9))) for name in "ab"]
    await asyncio.sleep(0)
    drain = asyncio.create_task(world.client.drain())
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await asyncio.wait_for(world.answer(world.request("c", A, 9)), 20)
    await asyncio.wait_for(drain, 20)
    await asyncio.sleep(0)
    assert await asyncio.wait_for(asyncio.gather(*tasks), 20) == [fakes.expected_answer(A, 9)] * 2
    world.client.resume()
    assert await asyncio.wait_for(world.answer(world.request("d", B, 3)), 20) == fakes.expected_answer(B, 3)
    await world.client.close()


async def test_a_drain_of_nothing_is_over_at_once(world: ClientWorld) -> None:
    await asyncio.wait_for(world.client.drain(), 20)
    await world.client.close()


async def test_a_drain_does_not_wait_for_those_that_it_refuses(world: ClientWorld) -> None:
    """Found here: with one refused request always under way, the drain did not end."""
    first = asyncio.create_task(world.answer(world.request("a", A, 5)))
    await asyncio.sleep(0)
    drain = asyncio.create_task(world.client.drain())
    refused: list[asyncio.Task[list[int]]] = []
    for n in range(2000):
        refused.append(asyncio.create_task(world.answer(world.request(f"r{n}", B, 3))))
        await asyncio.sleep(0)
        if drain.done():
            break
        if len(refused) > 1:
            await asyncio.wait(refused[-2:-1])
    assert drain.done(), "2,000 refusals later"
    assert await first == fakes.expected_answer(A, 5)
    await asyncio.wait(refused)
    assert all(isinstance(task.exception(), Overloaded) for task in refused)
    await world.client.close()


async def test_a_drain_tells_that_the_engine_died(world: ClientWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(batch: object) -> list[Any]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(world.fake.runner, "run", broken)
    world.client.pause()
    task = asyncio.create_task(world.answer(world.request("a", A, 9)))
    await asyncio.wait_for(world.paused.wait(), 20)
    with pytest.raises(ReplicaLost, match="out of memory"):
        await asyncio.wait_for(world.client.drain(), 20)
    with pytest.raises(ReplicaLost):
        await task
