"""`kvray lab journal`: recordings of the same code are equal, those of other code differ where it acts first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster.cli import app
from cluster.lab.journal import STEPS, read, record
from worker.kvcache.block_journal import BlockAction, canonical


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["lab", "journal", *(str(argument) for argument in arguments)])


def test_the_same_workload_twice_is_equal(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run("record", tmp_path / name).exit_code == 0
    result = run("diff", tmp_path / "a", tmp_path / "b")
    assert (result.exit_code, result.stdout) == (0, f"equal: {len(record())} entries\n")


def test_the_first_difference_is_printed_and_ends_with_1(tmp_path: Path) -> None:
    run("record", tmp_path / "a")
    run("record", tmp_path / "b", "--no-partial-reuse")
    result = run("diff", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 1
    first, *before, ours, theirs = result.stdout.splitlines()
    assert first.startswith("first difference at entry ")
    assert len(before) == 3
    assert " copy " in ours and " copy " not in theirs, "without partial reuse the first copy is missing"


def test_a_file_holds_what_was_recorded(tmp_path: Path) -> None:
    run("record", tmp_path / "a")
    assert read(tmp_path / "a") == canonical(record())
    first = json.loads((tmp_path / "a").read_text().splitlines()[0])
    assert list(first) == ["step", "action", "seq_id", "block", "refs", "free"]
    assert first["block"] == 0


def test_the_workload_does_everything_there_is() -> None:
    entries = record()
    assert {entry.action for entry in entries} == set(BlockAction)
    assert entries[-1].step > STEPS - 5
    assert min(entry.free for entry in entries) == 0


@pytest.mark.parametrize("line", ["nonsense", "{}", '{"step": 1, "action": "dance"}', "[]"])
def test_what_is_no_journal_is_one_line(tmp_path: Path, line: str) -> None:
    run("record", tmp_path / "a")
    (tmp_path / "b").write_text((tmp_path / "a").read_text().splitlines()[0] + "\n" + line + "\n")
    result = run("diff", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 2
    assert result.stderr == f"kvray: line 2 of {tmp_path / 'b'} is no journal entry\n"


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    result = run("record", tmp_path / "no" / "a")
    assert result.exit_code == 2
    assert result.stderr == f"kvray: {tmp_path / 'no' / 'a'} cannot be written: No such file or directory\n"


def test_a_missing_file_is_wrong_usage(tmp_path: Path) -> None:
    result = run("diff", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 2
