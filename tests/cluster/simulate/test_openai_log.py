"""openai_log: the forms of a log, what becomes of each request, and that no text comes out, in errors neither."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import ConfigError, InvalidRequest
from cluster.simulate.ideal_hits import ideal_hits
from cluster.simulate.openai_log import LogRequests, read_log

SECRET = "xyzzy-secret"


class WordTokenizer:
    """A character is a token; a template that knows three roles, in turns."""

    vocab_size = 1 << 20

    def __init__(self) -> None:
        self.rendered: list[str] = []

    def encode(self, text: str) -> list[int]:
        if "\x00" in text:
            raise RuntimeError(f"cannot tokenise {text}")
        return [ord(one) for one in text]

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        roles = [message["role"] for message in messages]
        twice = any(a == b for a, b in pairwise(roles))
        if twice or not {*roles} <= {"system", "user", "assistant"}:
            raise InvalidRequest("messages", f"not these: {messages}")
        self.rendered.append("".join(f"<{message['role']}>{message['content']}" for message in messages))
        return self.encode(self.rendered[-1])


def read(tmp_path: Path, *lines: Any, tokenizer: WordTokenizer | None = None, **options: Any) -> LogRequests:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    chosen = {"block_tokens": 4, "default_output": 99, **options}
    return read_log(path, tokenizer or WordTokenizer(), **chosen)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_three_forms_and_where_times_and_lengths_come_from(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        {"timestamp": 100.25, "body": {"messages": user("hello")}, "usage": {"completion_tokens": 57}},
        {"timestamp": "1970-01-01T00:01:40.750Z", "model": "m", "prompt": "abcdefgh", "max_tokens": 30},
        "",
        {
            "custom_id": "a",
            "url": "/v1/completions",
            "body": {"prompt": [7, 8, 9]},
            "response": {"body": {"created": 99.5, "usage": {"completion_tokens": 0}}},
        },
        {"timestamp": 1_764_525_600_000, "prompt": [[1, 2]]},
    )
    assert [request.arrival_s for request in log.requests[:3]] == pytest.approx([0.0, 0.75, 1.25])
    assert log.requests[3].arrival_s == pytest.approx(1_764_525_600 - 99.5)
    assert [request.prompt_tokens for request in log.requests] == [3, len("<user>hello"), 8, 2]
    assert [request.output_tokens for request in log.requests] == [1, 57, 30, 99]
    assert log.lengths == {"usage": 2, "max_tokens": 1, "default": 1}
    assert log.timed and not log.left_out


def test_what_is_equal_at_the_beginning_can_hit_but_never_across_models_and_salts(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        {"timestamp": 0.5, "prompt": "abcdefghij"},
        {"timestamp": 1.5, "prompt": "abcdefghXX"},
        {"timestamp": 2.5, "prompt": "abcdefghij", "model": "other"},
        {"timestamp": 3.5, "prompt": "abcdefghij", "cache_salt": "mine"},
        {"timestamp": 4.5, "prompt": "abcdefghij", "cache_salt": "mine"},
    )
    assert ideal_hits(log.requests) == [0, 8, 0, 0, 8]
    assert all(request.segment_tokens == 4 for request in log.requests)


def test_tools_and_parts_count_and_what_is_no_text_is_told(tmp_path: Path) -> None:
    tokenizer = WordTokenizer()
    parts = [{"type": "text", "text": "one"}, {"type": "image_url", "image_url": "u"}, {"type": "text", "text": "two"}]
    calls = [{"function": {"name": "f"}}]
    messages = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "42"},
        {"role": "user", "content": "and"},
    ]
    body = {"messages": messages, "tools": [{"name": "f"}]}
    assert read(tmp_path, {"timestamp": 1, "body": body}, tokenizer=tokenizer).left_out == 1
    assert tokenizer.rendered == [
        '<system>[{"name": "f"}]\nrules<user>one\ntwo<assistant>[{"function": {"name": "f"}}]<user>42\nand'
    ]


def test_whole_seconds_are_smeared_and_a_log_without_times_comes_by_chance(tmp_path: Path) -> None:
    whole = read(tmp_path, *({"timestamp": 5 + n // 10, "prompt": "abc"} for n in range(20)))
    times = [request.arrival_s for request in whole.requests]
    assert times[0] == 0.0 and len(set(times)) == 20 and times[-1] < 2.0
    untimed = read(tmp_path, *({"prompt": "abc"} for _ in range(400)))
    assert not untimed.timed
    assert untimed.requests[-1].arrival_s == pytest.approx(400, rel=0.2)
    assert untimed == read(tmp_path, *({"prompt": "abc"} for _ in range(400)))


def test_a_limit_counts_requests(tmp_path: Path) -> None:
    assert len(read(tmp_path, *({"prompt": "abc"} for _ in range(9)), limit=4).requests) == 4


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (f'{{"prompt": "{SECRET}', "not valid JSON"),
        (f'["{SECRET}"]', "not a JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ({"timestamp": 1, "body": SECRET}, "body must be"),
        ({"timestamp": 1, "body": {"input": SECRET}}, "neither messages nor prompt"),
        ({"timestamp": 1, "prompt": [SECRET, SECRET]}, "2 prompts"),
        ({"timestamp": 1, "prompt": {"text": SECRET}}, "string or a list"),
        ({"timestamp": 1, "prompt": [1 << 21]}, "token ids from 0"),
        ({"timestamp": 1, "prompt": ""}, "the prompt is empty"),
        ({"timestamp": 1, "prompt": f"{SECRET}\x00"}, "cannot be tokenised"),
        ({"timestamp": 1, "messages": SECRET}, "messages must be"),
        ({"timestamp": 1, "messages": [SECRET]}, "object with a role"),
        ({"timestamp": 1, "messages": [{"role": "user", "content": {"x": SECRET}}]}, "content must be"),
        ({"timestamp": 1, "messages": [{"role": SECRET, "content": SECRET}]}, "template refuses"),
        ({"timestamp": SECRET, "prompt": "abc"}, "ISO 8601"),
        ({"timestamp": True, "prompt": "abc"}, "timestamp must be seconds"),
        ({"timestamp": -1, "prompt": "abc"}, "timestamp must be seconds"),
        ({"prompt": "abc"}, "some lines have a timestamp"),
        ({"timestamp": 1, "prompt": "abc", "max_tokens": SECRET}, "answer's length"),
        ({"timestamp": 1, "prompt": "abc", "usage": {"completion_tokens": -3}}, "answer's length"),
    ],
)
def test_a_bad_line_is_named_and_nothing_of_it_repeated(tmp_path: Path, line: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"log.jsonl, line 2: .*{problem}") as caught:
        read(tmp_path, {"timestamp": 1, "prompt": "abc"}, line)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"timestamp": 1, "prompt": "abc"}\n\xff\xfe\n')
    with pytest.raises(ConfigError, match="line 2: not valid UTF-8"):
        read_log(path, WordTokenizer(), block_tokens=4, default_output=1)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_log(tmp_path / "none", WordTokenizer(), block_tokens=4, default_output=1)
    path.write_bytes(b"\n")
    with pytest.raises(ConfigError, match="no requests"):
        read_log(path, WordTokenizer(), block_tokens=4, default_output=1)
