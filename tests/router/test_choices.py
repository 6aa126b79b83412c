"""Several choices of one request, from the wire's fields to the replies' shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_dispatcher import Attempt, DoorWorld, ids_of

from cluster.core.replica import WorkerId
from cluster.core.request import FinishReason, TokenDelta
from cluster.rpc import inference_pb2 as pb
from router.generation import GenerationCall, GenerationEvent, Usage
from router.grpc_convert import call_from, chunk_from, response_from
from router.http_replies import CHAT, COMPLETION, Reply
from router.http_schema import CompletionBody, parse

USAGE = Usage(prompt_tokens=5, completion_tokens=4, cached_tokens=3)
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def event(text: str, index: int, reason: FinishReason | None = None, score: float | None = None) -> GenerationEvent:
    return GenerationEvent(
        text=text,
        token_ids=ids_of(text),
        usage=USAGE,
        replica=WorkerId("w"),
        finish_reason=reason,
        index=index,
        score=score,
    )


EVENTS = [event("a", 0), event("x", 1), event("y", 1, STOP), event("b", 0, LENGTH)]


def test_interleaved_choices_become_one_reply() -> None:
    reply = Reply(COMPLETION, model="m", created=1).whole(EVENTS)
    assert [(c["index"], c["text"], c["finish_reason"]) for c in reply["choices"]] == [
        (0, "ab", "length"),
        (1, "xy", "stop"),
    ]
    assert reply["usage"]["completion_tokens"] == 4
    assert "score" not in reply["choices"][0]


def test_a_stream_opens_every_choice_and_names_it_in_every_chunk() -> None:
    reply = Reply(CHAT, model="m", created=1, num_choices=2)
    assert [chunk["choices"][0]["index"] for chunk in reply.first_chunks()] == [0, 1]
    assert all(chunk["choices"][0]["delta"]["role"] == "assistant" for chunk in reply.first_chunks())
    assert [reply.chunk(e)["choices"][0]["index"] for e in EVENTS] == [0, 1, 1, 0]


def test_beams_carry_their_scores() -> None:
    reply = Reply(COMPLETION, model="m", created=1).whole([event("a", 0, STOP, -0.5), event("b", 1, STOP, -0.75)])
    assert [choice["score"] for choice in reply["choices"]] == [-0.5, -0.75]
    message = response_from([event("a", 0, STOP, -0.5), event("b", 1, STOP, -0.75)], "id")
    assert [(c.index, c.text, c.score) for c in message.choices] == [(0, "a", -0.5), (1, "b", -0.75)]
    assert message.text == "a" and message.finish_reason == pb.FINISH_REASON_STOP
    chunk = chunk_from(event("b", 1, STOP, -0.75), "id")
    assert (chunk.index, chunk.score) == (1, -0.75)
    assert not chunk_from(event("b", 1), "id").HasField("score")


@pytest.mark.parametrize(
    ("body", "sampling", "choices"),
    [
        ({"n": 3}, {"n": 3}, 3),
        ({"n": 2, "best_of": 4}, {"n": 2, "best_of": 4}, 2),
        ({"beam_width": 4, "length_penalty": 0.5}, {"beam_width": 4, "length_penalty": 0.5}, 4),
        ({"use_beam_search": True, "n": 4, "early_stopping": "never"}, {"n": 4, "beam_width": 4}, 4),
        ({"use_beam_search": True, "n": 2, "best_of": 5}, {"n": 2, "beam_width": 5}, 2),
        ({"use_beam_search": False}, {}, 1),
    ],
)
def test_http_fields(body: dict[str, Any], sampling: dict[str, Any], choices: int) -> None:
    call = parse(CompletionBody, json.dumps({"prompt": "a", **body}).encode()).call()
    assert call.num_choices == choices
    assert {name: value for name, value in call.sampling.items() if name not in ("max_tokens", "early_stopping")} == (
        sampling
    )
    assert call.sampling.get("early_stopping") == body.get("early_stopping")


@pytest.mark.parametrize(
    ("value", "early"),
    [(pb.EARLY_STOPPING_UNSPECIFIED, None), (pb.EARLY_STOPPING_FIRST, True), (pb.EARLY_STOPPING_NEVER, "never")],
)
def test_grpc_fields(value: pb.EarlyStopping, early: bool | str | None) -> None:
    options = pb.SamplingOptions(n=2, beam_width=3, length_penalty=0.0, early_stopping=value)
    call = call_from(pb.GenerateRequest(text="a", sampling=options), None)
    assert call.sampling.pop("early_stopping", None) == early
    assert call.sampling == {"n": 2, "beam_width": 3, "length_penalty": 0.0}
    assert call.num_choices == 2


def delta(text: str, index: int, reason: FinishReason | None = None, *, more: bool = False) -> TokenDelta:
    return TokenDelta(request_id="r", token_ids=ids_of(text), finish_reason=reason, choice=index, more=more)


async def events_of(deltas: list[TokenDelta], **sampling: Any) -> tuple[list[GenerationEvent], DoorWorld]:
    world = DoorWorld([Attempt("a", list(deltas))])
    return [e async for e in world.door.generate(GenerationCall(text="hello", sampling=sampling))], world


async def test_the_front_door_keeps_the_choices_apart() -> None:
    deltas = [delta("a", 0), delta("x", 1), delta("b", 0, LENGTH, more=True), delta("y", 1, LENGTH)]
    events, world = await events_of(deltas, n=2)
    assert [(e.index, e.text, e.finish_reason) for e in events] == [
        (0, "a", None),
        (1, "x", None),
        (0, "b", LENGTH),
        (1, "y", LENGTH),
    ]
    assert events[-1].usage.completion_tokens == 4
    assert world.live() == 0


async def test_a_stop_string_ends_its_choice_alone_and_the_last_one_ends_the_request() -> None:
    deltas = [delta("a.", 0), delta("x", 1), delta("zzz", 0), delta("y.", 1), delta("zzz", 0), delta("zzz", 1)]
    events, world = await events_of(deltas, n=2, stop=["."])
    assert [(e.index, e.text, e.finish_reason) for e in events] == [
        (0, "a", STOP),
        (1, "x", None),
        (1, "y", STOP),
    ]
    assert world.attempts[0].ending == "closed"  # the engine is told to stop
    assert world.attempts[0].sent == 4
    assert world.live() == 0
