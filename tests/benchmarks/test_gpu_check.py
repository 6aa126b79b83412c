"""The command: one child per section, the table, the exit codes, and one line where there is no CUDA device."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from cpu_device import cpu_environment

from benchmarks import gpu_check
from benchmarks.gpu.report import Row
from benchmarks.gpu.sections import SECTIONS, Section, countdown, rows_of, run_in_child
from cluster.model_source import DEMO_NAME

Call = tuple[str, list[str]]


def nothing(_: object) -> Iterator[Row]:
    yield from ()


class Children:
    """Stands in for run_in_child."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.calls = failing, list[Call]()

    def __call__(self, section: Section, command: Sequence[str]) -> list[Row]:
        self.calls.append((section.name, list(command)))
        return [Row("a", "failed" if section.name in self.failing else "ok", "b")]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRAY_CACHE", str(tmp_path))
    return tmp_path


def test_every_section_runs_in_its_own_process(capsys: pytest.CaptureFixture[str]) -> None:
    children = Children()
    assert gpu_check.main([], children, no_cuda=lambda: None) == 0
    assert [name for name, _ in children.calls] == [section.name for section in SECTIONS]
    assert children.calls[2][1] == [sys.executable, "-m", "benchmarks.gpu_check", "--only", "parity", "--rows"]
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "| section | what | verdict | found |"
    assert out[-1].startswith(f"{len(SECTIONS)} ok, 0 warning, 0 skipped, 0 failed; ")


def test_a_failed_section_does_not_stop_the_others() -> None:
    children = Children("conformance")
    assert gpu_check.main([], children, no_cuda=lambda: None) == 1
    assert len(children.calls) == len(SECTIONS)


def test_all_sections_take_at_most_ten_minutes() -> None:
    assert sum(section.limit_s for section in SECTIONS) <= 600


def test_the_demo_model_is_used_where_it_is(empty_cache: Path) -> None:
    demo = empty_cache / "models" / DEMO_NAME
    demo.mkdir(parents=True)
    (demo / "config.json").write_text("{}")
    children = Children()
    gpu_check.main(["--only", "parity"], children, no_cuda=lambda: None)
    ((_, command),) = children.calls
    assert command[-2:] == ["--model", str(demo)]


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu_check.main(["--model", str(tmp_path / "none")], Children(), no_cuda=lambda: None) == 2
    assert capsys.readouterr().out.startswith("gpu-check: --model: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_it_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    children = Children()
    assert gpu_check.main([], children) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("gpu-check needs a CUDA device: ")
    assert children.calls == []


def test_a_child_prints_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check, "cuda_environment", lambda model, left: cpu_environment(model=model))
    assert gpu_check.main(["--only", "versions", "--rows"], no_cuda=lambda: None) == 0
    rows = [Row.from_line(line) for line in capsys.readouterr().out.splitlines()]
    assert None not in rows
    assert "kvray" in [row.what for row in rows if row]


def child(code: str, limit_s: float = 30.0) -> list[Row]:
    return run_in_child(Section("parity", limit_s, nothing), [sys.executable, "-c", code])


ROW = Row("a", "ok", "b")
PRINT = f"print('noise', {ROW.to_line()!r}, sep=chr(10), flush=True)"


def test_rows_of_a_child() -> None:
    assert child(PRINT) == [ROW]


def test_a_child_that_hangs_is_stopped_and_its_rows_are_kept() -> None:
    hang = f"{PRINT}; import subprocess; subprocess.run(['sleep', '30'])"
    assert child(hang, 2.0) == [ROW, Row("parity", "failed", "stopped after 2 s")]


def test_a_child_that_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    broken = "the process ended with code 1: ValueError: no"
    assert child(f"{PRINT}; raise ValueError('no')") == [ROW, Row("parity", "failed", broken)]
    assert "Traceback" in capsys.readouterr().err
    assert child("import os; os.abort()")[0].found.startswith("the process ended with code -6: ")


def test_a_child_that_says_nothing_fails() -> None:
    assert child("pass") == [Row("parity", "failed", "it gave no row")]


def test_a_section_that_raises_keeps_its_rows() -> None:
    def rows(_: object) -> Iterator[Row]:
        yield ROW
        raise RuntimeError("CUDA error")

    assert list(rows_of(Section("x", 1.0, rows), None)) == [ROW, Row("x", "failed", "RuntimeError: CUDA error")]  # type: ignore[arg-type]


def test_countdown() -> None:
    times = iter([10.0, 12.0, 17.0])
    left = countdown(5.0, lambda: next(times))
    assert (left(), left()) == (3.0, -2.0)
