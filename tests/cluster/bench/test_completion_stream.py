"""What servers send in a stream of completions, and what becomes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.bench.completion_stream import CompletionStream
from cluster.bench.peer import TimedAnswer
from cluster.core.errors import KvrayError


def line(chunk: Any) -> bytes:
    return f"data: {json.dumps(chunk)}\n".encode()


def text(words: str) -> bytes:
    return line({"choices": [{"text": words}]})


def read(*lines: bytes) -> TimedAnswer:
    stream = CompletionStream()
    for place, content in enumerate(lines, start=1):
        stream.feed(content, float(place))
    return stream.answer(99.0)


def test_times_and_counts() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    answer = read(b": ping\n", text(""), text("a"), text("b"), line({"choices": [], "usage": usage}), b"data: [DONE]")
    assert answer == TimedAnswer(
        text="ab", first_s=3.0, last_s=4.0, end_s=99.0, prompt_tokens=7, answer_tokens=5, cached_tokens=4
    )


@pytest.mark.parametrize(
    ("last", "cached"),
    [
        ({"usage": {"prompt_tokens": 7, "completion_tokens": 1}}, None),
        ({"usage": {"prompt_tokens_details": None}}, None),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": 0}}}, 0),
        ({"timings": {"cache_n": 3, "predicted_n": 2}}, 3),
        ({"timings": {"cache_n": 3}, "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}, 2),
    ],
)
def test_cached_tokens_that_are_not_reported_are_not_zero(last: dict[str, Any], cached: int | None) -> None:
    assert read(text("a"), line(last)).cached_tokens == cached


def test_without_a_count_the_chunks_are_counted() -> None:
    assert read(text("a"), text("b"), text("c")).answer_tokens == 3
    assert read(text("a"), line({"timings": {"predicted_n": 9}})).answer_tokens == 9


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([text("a"), line({"error": {"message": "out of memory"}})], "out of memory"),
        ([b"data: <html>"], "no JSON object"),
        ([b"data: 5"], "no JSON object"),
        ([text("")], "without any text"),
    ],
)
def test_broken_streams_say_why(lines: list[bytes], message: str) -> None:
    with pytest.raises(KvrayError, match=message):
        read(*lines)
