"""FrontDoor: answers, stop strings, early ends, deadlines, and routing again when a replica refuses or dies."""

from __future__ import annotations

import asyncio

import pytest
from fake_dispatcher import CHUNK_TOKENS, HANG, SLOW_S, Attempt, DoorWorld, answer, delta, ids_of

from cluster.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, ReplicaLost
from cluster.core.request import FinishReason
from router.generation import GenerationCall, GenerationEvent, Usage

PROMPT = "the prompt"
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def call(timeout_s: float | None = None, **sampling: object) -> GenerationCall:
    return GenerationCall(text=PROMPT, timeout_s=timeout_s, sampling=sampling)


def lost(worker: str | None) -> ReplicaLost:
    return ReplicaLost("the replica died", **({} if worker is None else {"worker_id": worker}))


def full(worker: str) -> Overloaded:
    return Overloaded("the queue is full", retry_after_s=2.5, worker_id=worker)


async def run(world: DoorWorld, request: GenerationCall, into: list[GenerationEvent] | None = None) -> str:
    """The whole text. `into` keeps the events when the call ends in an error."""
    events = [] if into is None else into
    async for event in world.door.generate(request):
        events.append(event)
    return "".join(event.text for event in events)


# --- answers ---


async def test_an_answer_with_everything_a_client_is_told() -> None:
    world = DoorWorld([Attempt("a", [delta("H", cached=4), delta("el"), delta("lo", LENGTH)])])
    events: list[GenerationEvent] = []
    assert await run(world, call(max_tokens=5), events) == "Hello"
    assert [e.token_ids for e in events] == [ids_of("H"), ids_of("el"), ids_of("lo")]
    assert [e.usage for e in events] == [
        Usage(prompt_tokens=len(PROMPT), completion_tokens=count, cached_tokens=4) for count in (1, 3, 5)
    ]
    assert [e.finish_reason for e in events] == [None, None, LENGTH]
    assert {e.replica for e in events} == {"a"}


async def test_the_replica_gets_token_ids_and_the_routers_name() -> None:
    world = DoorWorld([Attempt("a", answer("x"))])
    await run(world, call(max_tokens=3, temperature=0, stop=["z"], top_p=None))
    assert (world.request.prompt_token_ids, world.request.router_id) == (ids_of(PROMPT), "me")
    sampling = world.request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.stop, sampling.top_p) == (3, 0, ("z",), 1.0)
    assert world.hints[0].request_id == world.request.request_id
    assert world.hints[0].prompt_tokens == len(PROMPT)


async def test_a_booking_counts_until_the_first_token_and_the_request_until_the_end() -> None:
    world = DoorWorld([Attempt("a", [0.0, *answer("ab")])])
    stream = world.door.generate(call())
    first = asyncio.ensure_future(anext(stream))
    while not world.dispatcher.used:
        await asyncio.sleep(0)
    assert (world.uncached(), world.live()) == (len(PROMPT), 1)
    await first
    assert (world.uncached(), world.live()) == (0, 1)
    assert [event.text async for event in stream] == ["b"]
    assert world.live() == 0


async def test_an_empty_last_delta_ends_the_answer() -> None:
    world = DoorWorld([Attempt("a", [delta("ab"), delta("", STOP)])])
    events: list[GenerationEvent] = []
    assert await run(world, call(), events) == "ab"
    assert [e.finish_reason for e in events] == [None, STOP]
    assert events[-1].usage.completion_tokens == 2


# --- stop strings ---


async def test_a_stop_string_ends_the_request_and_closes_the_stream() -> None:
    world = DoorWorld([Attempt("a", [delta("Hel"), delta("lo world"), delta("more"), HANG])])
    events: list[GenerationEvent] = []
    assert await run(world, call(stop=["o w"]), events) == "Hell"
    assert events[-1].finish_reason is STOP
    assert events[-1].token_ids == ids_of("lo w")  # what came after the stop string does not count
    assert events[-1].usage.completion_tokens == len("Hello w")
    assert (world.dispatcher.used[0].sent, world.dispatcher.used[0].ending) == (2, "closed")
    assert world.live() == 0


async def test_text_held_back_for_a_stop_string_comes_out_at_the_end() -> None:
    world = DoorWorld([Attempt("a", [delta("Hel"), delta("lo", LENGTH)])])
    events: list[GenerationEvent] = []
    assert await run(world, call(stop=["lo!"]), events) == "Hello"
    assert [(e.text, e.finish_reason) for e in events] == [("He", None), ("llo", LENGTH)]


# --- early ends ---


async def test_a_client_that_closes_the_stream_releases_everything() -> None:
    world = DoorWorld([Attempt("a", answer("abcdef"))])
    stream = world.door.generate(call())
    await anext(stream)
    assert world.live() == 1
    await stream.aclose()
    assert (world.dispatcher.used[0].sent, world.dispatcher.used[0].ending) == (1, "closed")
    assert world.live() == 0


async def test_a_cancelled_client_releases_everything() -> None:
    world = DoorWorld([Attempt("a", [delta("a"), HANG])])
    events: list[GenerationEvent] = []
    task = asyncio.create_task(run(world, call(), events))
    while not events:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.dispatcher.used[0].ending == "cancelled"
    assert world.live() == 0


@pytest.mark.parametrize("before", ["", "ab"])
async def test_the_deadline_ends_a_silent_request(before: str) -> None:
    world = DoorWorld([Attempt("a", [*map(delta, before), HANG])])
    events: list[GenerationEvent] = []
    with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
        await run(world, call(timeout_s=0.2), events)
    assert [e.text for e in events] == list(before)
    assert world.dispatcher.used[0].ending == "cancelled"
    assert world.live() == 0


async def test_the_deadline_is_for_the_whole_answer_not_for_each_token() -> None:
    steps = [step for char in "abcdefghij" for step in (SLOW_S, delta(char))]
    world = DoorWorld([Attempt("a", [*steps, delta("k", LENGTH)])])
    with pytest.raises(DeadlineExceeded):
        await run(world, call(timeout_s=2.5 * SLOW_S))
    assert sum(attempt.sent for attempt in world.dispatcher.used) <= 2
    assert world.live() == 0


async def test_another_attempt_has_the_same_deadline() -> None:
    world = DoorWorld([Attempt("a", [SLOW_S, lost("a")]), Attempt("b", [SLOW_S, lost("b")]), Attempt("c", [HANG])])
    with pytest.raises(DeadlineExceeded):
        await run(world, call(timeout_s=1.5 * SLOW_S))
    assert len(world.dispatcher.used) <= 2
    assert world.live() == 0


@pytest.mark.parametrize("timeout_s", [None, 60])
async def test_a_timeout_below_is_not_the_clients_deadline(timeout_s: float | None) -> None:
    world = DoorWorld([Attempt("a", [TimeoutError("somebody else's")])])
    with pytest.raises(TimeoutError, match="somebody else's"):
        await run(world, call(timeout_s=timeout_s))
    assert world.live() == 0


# --- routing again ---


async def test_a_replica_lost_before_the_first_token_is_replaced() -> None:
    world = DoorWorld([Attempt("a", [lost("a")]), Attempt("b", [delta("ok", LENGTH, cached=4)])])
    events: list[GenerationEvent] = []
    assert await run(world, call(seed=3), events) == "ok"
    assert events[0].replica == "b"
    assert world.lost == ["a"]
    assert [hint.exclude for hint in world.hints] == [frozenset(), {"a"}]
    first, second = world.dispatcher.used
    assert first.request == second.request  # the same id, seed and tokens
    assert first.hint is not None and second.hint is not None
    assert first.hint.chunk_hashes == second.hint.chunk_hashes != ()
    assert len(first.hint.chunk_hashes) == len(PROMPT) // CHUNK_TOKENS
    assert world.live() == 0


async def test_two_lost_replicas_are_enough() -> None:
    """It may be the request that kills them."""
    world = DoorWorld([Attempt(name, [lost(name)]) for name in "abc"])
    with pytest.raises(ReplicaLost) as caught:
        await run(world, call())
    assert caught.value.tokens == 0
    assert world.lost == ["a", "b"]
    assert [hint.exclude for hint in world.hints] == [frozenset(), {"a"}]
    assert world.live() == 0


async def test_a_loss_without_a_name_is_retried_and_blames_nobody() -> None:
    world = DoorWorld([Attempt("a", [lost(None)]), Attempt("b", answer("ok"))])
    assert await run(world, call()) == "ok"
    assert (world.lost, world.hints[1].exclude) == ([], frozenset())


async def test_a_broken_call_is_retried_elsewhere_without_declaring_the_replica_dead() -> None:
    broken = ReplicaLost("the call failed", worker_id="a", dead=False)
    world = DoorWorld([Attempt("a", [broken]), Attempt("b", answer("ok"))])
    assert await run(world, call()) == "ok"
    assert world.lost == []
    assert world.hints[1].exclude == {"a"}


async def test_a_stream_that_just_stops_is_a_loss_not_an_answer() -> None:
    world = DoorWorld([Attempt("a", []), Attempt("b", [delta("ab")])])
    with pytest.raises(ReplicaLost, match="after 2 tokens"):
        await run(world, call())
    assert len(world.dispatcher.used) == 2


async def test_a_replica_lost_after_tokens_is_not_retried() -> None:
    """A second answer would repeat tokens, or continue another text."""
    world = DoorWorld([Attempt("a", [delta("ab"), delta("c"), lost("a")]), Attempt("b", answer("abc"))])
    events: list[GenerationEvent] = []
    with pytest.raises(ReplicaLost, match="after 3 tokens") as caught:
        await run(world, call(), events)
    assert caught.value.tokens == 3
    assert [e.text for e in events] == ["ab", "c"]
    assert len(world.dispatcher.used) == 1
    assert world.lost == ["a"]
    assert world.live() == 0


async def test_a_refusal_is_routed_once_more() -> None:
    world = DoorWorld([Attempt("a", [full("a")]), Attempt("b", answer("ok"))])
    assert await run(world, call()) == "ok"
    assert [hint.exclude for hint in world.hints] == [frozenset(), {"a"}]
    assert world.lost == []  # a full replica is alive


async def test_a_second_refusal_surfaces() -> None:
    world = DoorWorld([Attempt("a", [full("a")]), Attempt("b", [full("b")]), Attempt("c", answer("no"))])
    with pytest.raises(Overloaded) as caught:
        await run(world, call())
    assert caught.value.retry_after_s == 2.5
    assert len(world.dispatcher.used) == 2
    assert world.live() == 0


async def test_a_loss_does_not_use_up_the_refusals_second_chance() -> None:
    world = DoorWorld([Attempt("a", [lost("a")]), Attempt("b", [full("b")]), Attempt("c", answer("ok"))])
    assert await run(world, call()) == "ok"
    assert world.hints[2].exclude == {"a", "b"}


async def test_other_errors_are_not_retried() -> None:
    world = DoorWorld([Attempt("a", [InvalidRequest("prompt", "no")]), Attempt("b", answer("ok"))])
    with pytest.raises(InvalidRequest):
        await run(world, call())
    assert len(world.dispatcher.used) == 1
    assert world.live() == 0


@pytest.mark.parametrize(
    ("streamed", "stop", "whole"), [(True, [], False), (False, [], True), (False, ["."], False), (True, ["."], False)]
)
async def test_only_a_whole_answer_without_stop_strings_comes_in_large_pieces(
    streamed: bool, stop: list[str], whole: bool
) -> None:
    """With a stop string the engine must be told at the token that completes it."""
    world = DoorWorld([Attempt("a", answer("hello"))])
    call = GenerationCall(text="hi", sampling={"stop": stop}, streamed=streamed)
    assert "".join([event.text async for event in world.door.generate(call)]) == "hello"
    assert world.attempts[0].whole is whole
