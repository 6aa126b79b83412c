"""`kvray lab blocks`: the block tables at each step, the same words as the journal, and no model libraries."""

from __future__ import annotations

import re
import subprocess
import sys

from rich.console import Console
from typer.testing import CliRunner

from cluster.cli import app
from cluster.lab.blocks import Scene, run_blocks, scenes

# step -> the block table of each sequence, as in the printed lines
EXPECTED: dict[int, dict[str, list[int]]] = {
    1: {"A": [0, 1, 2, 3]},
    2: {"A": [0, 1, 2, 3], "C": [0, 1, 4]},
    3: {"A": [0, 1, 2, 3], "B": [0, 1], "C": [0, 1, 4]},
    4: {"A": [0, 1, 2, 3], "B": [0, 5], "C": [0, 1, 4]},
    5: {"A": [0, 1, 2, 3], "B": [0, 5, 6], "C": [0, 1, 4]},
    6: {"A": [0, 1, 2, 3], "B": [0, 5, 6], "C": [0, 1, 4]},
    7: {"B": [0, 5, 6], "C": [0, 1, 4]},
    8: {},
    9: {"D": [2, 3, 4, 7]},
    10: {},
}


def printed() -> list[list[str]]:
    """The command's output, cut at the steps."""
    result = CliRunner().invoke(app, ["lab", "blocks"])
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout, "colours in a file"
    steps: list[list[str]] = []
    for line in result.stdout.splitlines():
        if line.startswith("step "):
            steps.append([])
        if steps:
            steps[-1].append(line)
    return steps


def tables(lines: list[str]) -> dict[str, list[int]]:
    found = (re.match(r"  table (\w)  ([\d ]+)   \d+ tokens", line) for line in lines)
    return {match[1]: [int(block) for block in match[2].split()] for match in found if match}


def row(lines: list[str], name: str) -> list[str]:
    (line,) = [line for line in lines if line.startswith(f"  {name}")]
    return line.removeprefix(f"  {name}").split()


def test_every_step_prints_the_expected_block_tables() -> None:
    steps = printed()
    assert {number: tables(lines) for number, lines in enumerate(steps, start=1)} == EXPECTED
    for number, lines in enumerate(steps, start=1):
        assert lines[0].startswith(f"step {number}: ")
        assert lines[1].startswith("  ") and len(lines[1]) > 40, "a sentence says why"


def test_the_fork_copies_one_block_at_its_first_write_and_never_sees_the_rest() -> None:
    steps = printed()
    assert not any({2, 3} & set(tables(lines).get("B", [])) for lines in steps)
    copies = [line for lines in steps for line in lines if "journal" in line and " copy " in line]
    assert copies == ["  journal  step=4 copy seq=B block=5 from=1 refs=1 free=2"]


def test_the_pool_row_agrees_with_the_tables() -> None:
    for lines in printed():
        held = tables(lines)
        holders = ["".join(name for name in held if block in held[name]) for block in range(8)]
        shown = row(lines, "held by")
        assert [word if word.isupper() else "" for word in shown] == holders
        assert row(lines, "refs") == [str(len(names)) for names in holders]
    assert row(printed()[7], "held by") == ["idle"] * 7 + ["."]


def test_the_journal_lines_replay_to_the_ref_counts() -> None:
    refs = [0] * 8
    for scene in scenes():
        for entry in scene.entries:
            refs[entry.block] = entry.refs
        assert tuple(refs) == scene.refs, scene.title


def test_the_sentences_tell_what_happened() -> None:
    by_title: dict[str, Scene] = {scene.title: scene for scene in scenes()}
    assert "finds 32 tokens" in by_title["C arrives with the same first 32 tokens and 8 others"].why
    write = by_title["B writes its first own token, number 30"].why
    assert "block 1," in write and "a copy, block 5" in write
    assert "blocks 2, 3 and 4 are evicted" in by_title["D arrives with 64 new tokens"].why
    assert "32 of its 50 tokens" in by_title["D ends"].why


def test_a_terminal_gets_the_same_words_in_colour() -> None:
    texts: list[str] = []
    for console in (Console(width=100, color_system=None), Console(width=100, force_terminal=True)):
        with console.capture() as capture:
            assert run_blocks(console) == 0
        texts.append(capture.get())
    plain, colour = texts
    assert "\x1b[" in colour and "\x1b[" not in plain
    assert re.sub(r"\x1b\[[\d;]*m", "", colour) == plain


def test_it_loads_no_model_library() -> None:
    code = (
        "import sys\n"
        "from cluster.lab.blocks import run_blocks\n"
        "from cluster.lab.journal import record\n"
        "run_blocks(); record()\n"
        "heavy = {'ray', 'torch', 'transformers', 'redis', 'grpc', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
