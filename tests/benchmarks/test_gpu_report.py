"""Rows of the GPU check: the table stays a table, and what failed decides the exit code."""

from __future__ import annotations

import pytest

from benchmarks.gpu.report import Row, exit_code, summary, table

RESULTS = [
    ("versions", [Row("torch", "ok", "2.13.0"), Row("driver", "warning", "old")]),
    ("parity", [Row("llama | bf16", "failed", "a\nb"), Row("qwen", "skipped", "no time left")]),
]


def test_the_table() -> None:
    assert table(RESULTS).splitlines() == [
        "| section | what | verdict | found |",
        "|---|---|---|---|",
        "| versions | torch | ok | 2.13.0 |",
        "| versions | driver | warning | old |",
        "| parity | llama \\| bf16 | **failed** | a b |",
        "| parity | qwen | skipped | no time left |",
    ]


def test_the_summary_counts_every_verdict() -> None:
    assert summary(RESULTS, 61.4) == "1 ok, 1 warning, 1 skipped, 1 failed; 61 s"


def test_only_a_failure_changes_the_exit_code() -> None:
    assert exit_code(RESULTS) == 1
    assert exit_code(RESULTS[:1]) == 0
    assert exit_code([("parity", RESULTS[1][1][1:])]) == 0


def test_a_row_survives_its_line() -> None:
    row = Row('a "quoted" | thing', "warning", "two\nlines")
    assert Row.from_line(row.to_line()) == row


@pytest.mark.parametrize(
    "line",
    ["", "Loading weights", "{}", "[1]", "3", '{"what": 1}', '{"what": "a", "verdict": "fine", "found": "b"}'],
)
def test_other_lines_are_no_rows(line: str) -> None:
    assert Row.from_line(line) is None
