"""read_trace, and the tokens made from hash ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import ConfigError
from cluster.simulate.mooncake_trace import read_trace
from cluster.simulate.prompt_tokens import PromptTokens
from cluster.simulate.virtual_runner import FILLER, VOCAB_SIZE

GOOD = {"timestamp": 3000, "input_length": 1100, "output_length": 50, "hash_ids": [0, 7, 8]}


def write(path: Path, *lines: Any) -> Path:
    file = path / "trace.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def test_a_line_becomes_a_request(tmp_path: Path) -> None:
    (request,) = read_trace(write(tmp_path, GOOD))
    assert (request.request_id, request.prompt_tokens, request.output_tokens) == ("r0", 1100, 50)
    assert request.hash_ids == (0, 7, 8)
    assert 3.0 <= request.arrival_s < 6.0


def test_arrivals_are_smeared_over_three_seconds_and_sorted(tmp_path: Path) -> None:
    file = write(tmp_path, *[GOOD] * 300)
    requests = read_trace(file)
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals) and len(set(arrivals)) == 300
    assert arrivals[0] < 3.1 and arrivals[-1] > 5.9
    assert {request.number for request in requests} == set(range(300))
    assert read_trace(file) == requests
    assert [r.arrival_s for r in read_trace(file, seed=1)] != arrivals


def test_a_limit_takes_the_first_lines_with_the_same_arrivals(tmp_path: Path) -> None:
    file = write(tmp_path, *[{**GOOD, "timestamp": 10_000 * n} for n in range(5)])
    assert read_trace(file, limit=2) == read_trace(file)[:2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ("", "line 2"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "line 2"),
        ({**GOOD, "timestamp": -1}, "timestamp"),
        ({**GOOD, "timestamp": 1.5}, "timestamp"),
        ({**GOOD, "timestamp": 10**400}, "timestamp"),
        ({**GOOD, "input_length": "1100"}, "input_length"),
        ({**GOOD, "input_length": True}, "input_length"),
        ({**GOOD, "input_length": 0, "hash_ids": []}, "at least 1"),
        ({**GOOD, "output_length": 0}, "at least 1"),
        ({**GOOD, "hash_ids": None}, "hash_ids"),
        ({**GOOD, "hash_ids": [0, 1, -2]}, "hash_ids"),
        ({**GOOD, "hash_ids": [0, 1, "2"]}, "hash_ids"),
        ({**GOOD, "hash_ids": [0, 1]}, "makes 3 blocks"),
        ({name: GOOD[name] for name in ("timestamp", "input_length", "hash_ids")}, "output_length"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=r"trace.jsonl, line 2: .+") as caught:
        read_trace(write(tmp_path, GOOD, line))
    assert message in caught.value.message


def test_a_file_that_is_missing_empty_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(write(tmp_path))
    (tmp_path / "trace.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "trace.jsonl")


def test_equal_ids_are_equal_tokens_and_others_differ_at_once(tmp_path: Path) -> None:
    a, b = read_trace(write(tmp_path, GOOD, {**GOOD, "timestamp": 10_000, "hash_ids": [0, 7, 9]}))
    tokens = PromptTokens([a, b])
    first, second = tokens.prompt(a), tokens.prompt(b)
    assert len(first) == len(second) == 1100
    assert first[:1024] == second[:1024]
    assert first[:512] != first[512:1024]
    assert sum(x == y for x, y in zip(first[1024:], second[1024:], strict=True)) < 5
    assert FILLER not in first and max(first) < VOCAB_SIZE
    assert PromptTokens([a, b]).prompt(a) == first
    assert PromptTokens([a, b], seed=1).prompt(a) != first


def test_a_partial_segment_is_the_beginning_of_the_whole_one(tmp_path: Path) -> None:
    short, whole = read_trace(write(tmp_path, GOOD, {**GOOD, "timestamp": 10_000, "input_length": 1500}))
    tokens = PromptTokens([short, whole])
    assert tokens.prompt(whole)[:1100] == tokens.prompt(short)
