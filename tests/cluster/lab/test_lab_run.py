"""`kvray lab`: experiments by name, a failure that loses nothing, and the files and exit codes of a run."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli import app
from cluster.lab.experiments import EXPERIMENTS, Entry
from cluster.lab.findings import Claim, Findings, LabContext, Verdict
from cluster.lab.lab_run import run_experiments

MODULE = "lab_run_test_experiment"


def good(context: LabContext) -> Findings:
    context.progress("half", 0.5)
    figures = {"good.seed": context.seed, "good.short": context.short}
    return Findings("good", "t", "s", (Claim("1.1", "c", "e", "m", Verdict.CONFIRMED),), figures=figures)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType(MODULE)
    made.run = good  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, made)
    return made


def quiet() -> Console:
    return Console(stderr=True, quiet=True)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_its_module(name: str) -> None:
    assert importlib.util.find_spec(EXPERIMENTS[name].module) is not None


def test_a_failed_experiment_loses_nobody_elses_findings(module: types.ModuleType) -> None:
    entries = {"a": Entry(MODULE, ""), "b": Entry("lab_run_no_such_module", ""), "c": Entry(MODULE, "")}
    outcomes = run_experiments(entries, LabContext(Path("x"), seed=7), quiet())
    assert [(one.name, one.failure) for one in outcomes] == [
        ("a", ""),
        ("b", "ModuleNotFoundError: No module named 'lab_run_no_such_module'"),
        ("c", ""),
    ]
    assert outcomes[2].findings is not None and outcomes[2].findings.figures["good.seed"] == 7


def test_the_command_writes_the_report_and_ends_with_1_after_a_failure(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    options = ["--model", str(model), "--out", str(tmp_path / "out" / "deep"), "--short", "--seed", "3"]
    for name in EXPERIMENTS:
        monkeypatch.setitem(EXPERIMENTS, name, Entry(MODULE, ""))
    done = CliRunner().invoke(app, ["lab", "all", *options, "--json"])
    assert done.exit_code == 0
    wire = json.loads(done.stdout)
    assert wire == json.loads((tmp_path / "out" / "deep" / "report.json").read_text())
    assert list(wire["experiments"]) == list(EXPERIMENTS)
    assert wire["short"] and wire["model"] == "model" and wire["figures"]["steps.good.seed"] == 3

    monkeypatch.setitem(EXPERIMENTS, "steps", Entry("lab_run_no_such_module", ""))
    done = CliRunner().invoke(app, ["lab", "all", *options])
    assert done.exit_code == 1
    assert "steps failed: ModuleNotFoundError" in done.stdout
    assert "1.1" in done.stdout


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "blocks"])
def test_one_experiment_is_a_command(
    name: str, module: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(EXPERIMENTS, name, Entry(MODULE, ""))
    done = CliRunner().invoke(app, ["lab", name, "--model", "."])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "lab-report" / name / "report.html").exists()


def test_a_folder_that_cannot_be_made_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["lab", "steps", "--out", str(tmp_path / "file" / "x")])
    assert done.exit_code == 2
    assert "cannot be made" in done.output


def test_drawn_scenes_answer_the_claims_of_block_tables() -> None:
    findings = EXPERIMENTS["blocks"].load()(LabContext(Path("none")))
    assert {claim.verdict for claim in findings.claims} == {Verdict.CONFIRMED}
    assert findings.figures["blocks.copied_at_write"] == 1
    assert "step 1: A arrives with 50 tokens" in findings.text
