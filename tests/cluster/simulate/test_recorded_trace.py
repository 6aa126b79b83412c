"""recorded_trace: kvray's own format, written and read, and told from Mooncake's."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from cluster.core.errors import ConfigError
from cluster.simulate.ideal_hits import ideal_hits
from cluster.simulate.recorded_trace import TraceWriter, read_requests

HEADER = '{"format": "kvray-trace", "version": 1, "block_tokens": 64}\n'


def written(*requests: tuple[float, int, int, list[str]]) -> str:
    file = io.StringIO()
    writer = TraceWriter(file, 64)
    for request in requests:
        writer.write(*request)
    assert writer.count == len(requests)
    return file.getvalue()


def test_what_is_written_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    text = written((3.127, 300, 50, ["a", "b", "c", "d"]), (2.95, 200, 12, ["a", "b", "e"]), (9.0, 10, 1, []))
    path.write_text(text)
    early, late, short = read_requests(path)
    assert (early.arrival_s, early.prompt_tokens, early.output_tokens, early.segment_tokens) == (2.95, 200, 12, 64)
    assert late.hash_ids[:4] == (0, 1, 2, 3) and early.hash_ids[:3] == (0, 1, 4)
    assert (len(early.hash_ids), len(late.hash_ids), len(short.hash_ids)) == (4, 5, 1)
    assert len({early.hash_ids[-1], late.hash_ids[-1], short.hash_ids[-1], 0, 1, 2, 3, 4}) == 8
    assert ideal_hits([early, late, short]) == [0, 128, 0]


def test_nothing_of_a_hash_is_in_the_file() -> None:
    text = written((0.0, 128, 1, ["secret", "words"]))
    assert [json.loads(line) for line in text.splitlines()][1]["hash_ids"] == [0, 1]
    assert "secret" not in text and "words" not in text


def test_blocks_without_an_id_are_never_found_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(written((0.0, 200, 1, []), (1.0, 200, 1, [])))
    assert ideal_hits(read_requests(path)) == [0, 0]


def test_a_mooncake_trace_is_still_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n')
    assert read_requests(path)[0].segment_tokens == 512


def test_a_limit_counts_requests(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(written(*((float(n), 10, 1, []) for n in range(5))))
    assert len(read_requests(path, limit=3)) == 3


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("nonsense", "line 2: Expecting value"),
        ("[]", "line 2: not a JSON object"),
        ('{"timestamp": 1.5, "input_length": 1, "output_length": 1, "hash_ids": []}', "line 2: timestamp"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}', "line 2: input_length"),
        ('{"timestamp": 1, "input_length": 64, "output_length": true, "hash_ids": []}', "line 2: output_length"),
        ('{"timestamp": 1, "input_length": 64, "output_length": 1, "hash_ids": [-1]}', "line 2: hash_ids must be"),
        ('{"timestamp": 1, "input_length": 64, "output_length": 1, "hash_ids": [1, 2]}', "1 whole blocks of 64"),
        ("", "has no requests"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(HEADER + (f"{line}\n" if line else ""))
    with pytest.raises(ConfigError, match=problem):
        read_requests(path)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ('{"format": "kvray-trace", "version": 2, "block_tokens": 64}', "version 2"),
        ('{"format": "kvray-trace", "version": 1, "block_tokens": 0}', "block_tokens"),
    ],
)
def test_another_version_is_refused(tmp_path: Path, header: str, problem: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(header)
    with pytest.raises(ConfigError, match=problem):
        read_requests(path)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_requests(tmp_path / "none.jsonl")
