"""Log probabilities from a replica's deltas to what each protocol shows, and the echo of the prompt."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fake_dispatcher import TOKENIZER, Attempt, DoorWorld, ids_of

from cluster.core.logprobs import TokenLogprob
from cluster.core.replica import WorkerId
from cluster.core.request import FinishReason, TokenDelta
from cluster.rpc import inference_pb2 as pb
from router.chunk_writer import ChunkWriter
from router.generation import GenerationCall, GenerationEvent, LogprobEntry, Usage
from router.grpc_convert import call_from, chunk_from, response_from
from router.http_logprobs import token_text
from router.http_replies import CHAT, COMPLETION, Reply
from router.sse import frame

USAGE = Usage(prompt_tokens=2, completion_tokens=2, cached_tokens=0)
A, B = ids_of("ab")


def told(text: str, *, choice: int = 0, more: bool = False, last: bool = False, **fields: Any) -> TokenDelta:
    """A delta whose tokens have the log probabilities -1, -2, ... and the alternative "b"."""
    ids = ids_of(text)
    return TokenDelta(
        request_id="r",
        token_ids=ids,
        choice=choice,
        more=more,
        finish_reason=FinishReason.LENGTH if last else None,
        logprobs=tuple(TokenLogprob(-1.0 - place, ((B, -0.5),)) for place in range(len(ids))),
        **fields,
    )


PROMPT_LOGPROBS = (None, TokenLogprob(-3.0, ((A, -0.25),)))


async def events_of(deltas: list[TokenDelta], *, echo: bool = False, **sampling: Any) -> list[GenerationEvent]:
    world = DoorWorld([Attempt("a", list(deltas))])
    call = GenerationCall(text="hi", sampling=sampling, echo=echo)
    return [event async for event in world.door.generate(call)]


async def test_every_token_has_its_entry_bytes_and_offset() -> None:
    text = "aé"
    events = await events_of([told(text[:1]), told(text[1:], last=True)], logprobs=1)
    entries = [entry for event in events for entry in event.logprobs or ()]
    assert [entry.piece for entry in entries] == [b"a", b"\xc3", b"\xa9"]
    assert [entry.logprob for entry in entries] == [-1.0, -1.0, -2.0]
    assert entries[0].top == (LogprobEntry(B, b"b", -0.5),)
    assert [offset for event in events for offset in event.text_offsets] == [0, 1, 1]
    assert all(event.prompt_logprobs is None for event in events)


async def test_what_nobody_asked_for_is_not_there() -> None:
    delta = TokenDelta(request_id="r", token_ids=ids_of("x"), finish_reason=FinishReason.LENGTH)
    (event,) = await events_of([delta])
    assert (event.logprobs, event.prompt_logprobs, event.text_offsets) == (None, None, ())
    assert Reply(CHAT, model="m", created=1).whole([event])["choices"][0]["logprobs"] is None
    assert not chunk_from(event, "id").logprobs


async def test_tokens_behind_a_stop_string_have_no_log_probabilities() -> None:
    events = await events_of([told("ab.cd", last=True)], logprobs=1, stop=["."])
    (event,) = events
    assert len(event.token_ids) == len(event.logprobs or ()) == 3


async def test_a_prompts_log_probabilities_come_once() -> None:
    deltas = [
        told("x", choice=0, prompt_logprobs=PROMPT_LOGPROBS, cached_tokens=0),
        told("y", choice=1, last=True, more=True),
        told("z", choice=0, last=True),
    ]
    events = await events_of(deltas, n=2, logprobs=1, prompt_logprobs=1)
    entries = events[0].prompt_logprobs
    assert entries == (
        LogprobEntry(ids_of("h")[0], b"h", None),
        LogprobEntry(ids_of("i")[0], b"i", -3.0, (LogprobEntry(A, b"a", -0.25),)),
    )
    assert [event.prompt_logprobs is None for event in events] == [False, True, True]
    told_json = [
        None,
        {
            str(A): {"logprob": -0.25, "decoded_token": "a"},
            str(ids_of("i")[0]): {"logprob": -3.0, "decoded_token": "i"},
        },
    ]
    assert Reply(COMPLETION, model="m", created=1).whole(events)["choices"][0]["prompt_logprobs"] == told_json
    assert "prompt_logprobs" not in Reply(COMPLETION, model="m", created=1).whole(events)["choices"][1]
    assert Reply(CHAT, model="m", created=1).whole(events)["prompt_logprobs"] == told_json
    assert Reply(CHAT, model="m", created=1).chunk(events[0])["prompt_logprobs"] == told_json
    message = response_from(events, "id")
    assert [entry.HasField("logprob") for entry in message.prompt_logprobs] == [False, True]
    assert [(e.token_id, e.piece) for e in chunk_from(events[0], "id").prompt_logprobs[1].top] == [(A, b"a")]


async def test_echo_puts_the_prompt_before_every_choice() -> None:
    deltas = [told("x", choice=0, prompt_logprobs=PROMPT_LOGPROBS), told("y", choice=1, last=True, more=True)]
    events = await events_of([*deltas, told("z", last=True)], echo=True, n=2, logprobs=1, prompt_logprobs=1)
    reply = Reply(COMPLETION, model="m", created=1).whole(events)
    assert [choice["text"] for choice in reply["choices"]] == ["hixz", "hiy"]
    first, second = (choice["logprobs"] for choice in reply["choices"])
    assert first == {
        "tokens": ["h", "i", "x", "z"],
        "token_logprobs": [None, -3.0, -1.0, -1.0],
        "top_logprobs": [None, {"a": -0.25, "i": -3.0}, {"b": -0.5, "x": -1.0}, {"b": -0.5, "z": -1.0}],
        "text_offset": [0, 1, 2, 3],
    }
    assert second["tokens"] == ["h", "i", "y"] and second["text_offset"] == [0, 1, 2]
    assert "prompt_logprobs" not in reply["choices"][0]


async def test_echo_alone_is_the_prompts_text() -> None:
    end = TokenDelta(request_id="r", token_ids=ids_of("!"), finish_reason=FinishReason.LENGTH)
    assert [event.text for event in await events_of([end], echo=True)] == ["hi!"]
    world = DoorWorld([Attempt("a", [end])])
    call = GenerationCall(token_ids=ids_of("é?"), echo=True)
    assert [event.text async for event in world.door.generate(call)] == ["é?!"]


def event(text: str, *values: float, finish: FinishReason | None = None) -> GenerationEvent:
    ids = ids_of(text)
    entries = tuple(
        LogprobEntry(token, TOKENIZER.token_bytes(token), value, (LogprobEntry(A, b"a", -0.5),))
        for token, value in zip(ids, values, strict=True)
    )
    return GenerationEvent(
        text=text,
        token_ids=ids,
        usage=USAGE,
        replica=WorkerId("w"),
        finish_reason=finish,
        logprobs=entries,
        text_offsets=tuple(range(len(ids))),
    )


EVENTS = [event("a", -0.5), event("bc", -1.5, -math.inf, finish=FinishReason.STOP)]


def test_chats_have_openais_form_whole_and_streamed() -> None:
    reply = Reply(CHAT, model="m", created=1)
    content = reply.whole(EVENTS)["choices"][0]["logprobs"]["content"]
    top = [{"token": "a", "logprob": -0.5, "bytes": [97]}]
    assert content == [
        {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": top},
        {"token": "b", "logprob": -1.5, "bytes": [98], "top_logprobs": top},
        {"token": "c", "logprob": -9999.0, "bytes": [99], "top_logprobs": top},  # JSON has no infinity
    ]
    chunks = [reply.chunk(each)["choices"][0]["logprobs"]["content"] for each in EVENTS]
    assert chunks == [content[:1], content[1:]]


def test_completions_have_openais_form_whole_and_streamed() -> None:
    reply = Reply(COMPLETION, model="m", created=1)
    assert reply.whole(EVENTS)["choices"][0]["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-0.5, -1.5, -9999.0],
        "top_logprobs": [{"a": -0.5}, {"a": -0.5, "b": -1.5}, {"a": -0.5, "c": -9999.0}],
        "text_offset": [0, 0, 1],
    }
    assert reply.chunk(EVENTS[0])["choices"][0]["logprobs"]["tokens"] == ["a"]


@pytest.mark.parametrize("shape", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_a_chunk_with_log_probabilities_is_written_in_full(shape: Any) -> None:
    reply = Reply(shape, model="m", created=1)
    writer = ChunkWriter(reply, include_usage=False)
    plain = GenerationEvent(text="x", token_ids=(1,), usage=USAGE, replica=WorkerId("w"))
    for each in [*EVENTS, plain, EVENTS[0]]:
        assert writer.chunk(each) == frame(reply.chunk(each))


def test_grpc_has_them_in_order() -> None:
    message = response_from(EVENTS, "id")
    (choice,) = message.choices
    assert [entry.logprob for entry in choice.logprobs] == [-0.5, -1.5, -math.inf]
    assert [entry.piece for entry in choice.logprobs] == [b"a", b"b", b"c"]
    assert [(e.token_id, e.logprob) for e in choice.logprobs[1].top] == [(A, -0.5)]
    assert [entry.token_id for entry in chunk_from(EVENTS[1], "id").logprobs] == list(ids_of("bc"))


def test_grpc_sampling_fields() -> None:
    values: dict[str, Any] = {
        "min_p": 0.0,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "logprobs": 0,
        "prompt_logprobs": 2,
        "include_stop_str_in_output": True,
    }
    options = pb.SamplingOptions(**values, logit_bias={7: -1.5, 3: 2.0})
    call = call_from(pb.GenerateRequest(text="a", sampling=options), None)
    assert call.sampling == {**values, "logit_bias": ((3, 2.0), (7, -1.5))}


@pytest.mark.parametrize(
    ("piece", "text"), [(b" the", " the"), ("漢".encode(), "漢"), (b"\xe6\xbc", "bytes:\\xe6\\xbc"), (b"", "")]
)
def test_tokens_as_text(piece: bytes, text: str) -> None:
    assert token_text(piece) == text
