"""The short form of the experiments: figures of the run hold together, and what must be so on every machine is so."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.lab.experiments import EXPERIMENTS
from cluster.lab.findings import Findings, LabContext, Verdict


def short(name: str, model_dir: Path) -> Findings:
    heard: list[float] = []
    context = LabContext(model_dir, short=True, threads=1, progress=lambda _phase, share: heard.append(share))
    findings = EXPERIMENTS[name].load()(context)
    assert heard == sorted(heard) and heard[0] >= 0 and heard[-1] <= 1
    assert findings.experiment == name and findings.claims
    return findings


def verdicts(findings: Findings) -> dict[str, Verdict]:
    return {claim.claim: claim.verdict for claim in findings.claims}


def test_arithmetic_is_the_articles_but_for_one_line(tiny_llama_dir: Path) -> None:
    findings = short("arithmetic", tiny_llama_dir)
    wrong = [claim for claim, verdict in verdicts(findings).items() if verdict is not Verdict.CONFIRMED]
    assert wrong == ["With MHA, 2,048 tokens then weigh like 4,096"]
    assert findings.figures["arithmetic.bytes_per_token"] == 128 * 1024
    assert findings.figures["arithmetic.block_bytes"] == 16 * 128 * 1024
    assert findings.figures["arithmetic.mha_weighs_like"] == 8192


def test_steps_give_the_same_answers_and_fewer_rows_at_every_stage(tiny_llama_dir: Path) -> None:
    figures = short("steps", tiny_llama_dir).figures
    rows = [figures[f"steps.{stage}.rows"] for stage in ("no_KV_cache", "contiguous_cache", "blocks", "prefix_cache")]
    assert rows[0] > rows[1] == rows[2] > rows[3]  # type: ignore[operator]
    same = {key: value for key, value in figures.items() if key.endswith(".same")}
    assert len(same) >= 4 and all(same.values())
    tokens, own = int(figures["steps.growth.tokens"]), 4
    assert figures["steps.growth.rows_without"] == tokens * own + tokens * (tokens - 1) // 2
    assert figures["steps.growth.rows_with"] == own + tokens - 1


def test_memory_bytes_of_the_tensor_are_those_of_the_account(tiny_llama_dir: Path) -> None:
    findings = short("memory", tiny_llama_dir)
    figures = findings.figures
    assert figures["memory.tensor_bytes"] == figures["memory.account_bytes"]
    assert verdicts(findings)["The pool's tensor is blocks times bytes per block"] is Verdict.CONFIRMED
    peaks = [figures[f"memory.{policy}.peak_mib"] for policy in ("paged", "reserve_own", "reserve_max")]
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]  # type: ignore[operator]
    assert figures["memory.grow.copied_bytes"] > 0  # type: ignore[operator]
    assert all(figures[f"memory.{policy}.tokens_per_s"] > 0 for policy in ("paged", "grow"))  # type: ignore[operator]
    assert {chart.name for chart in findings.charts} == {"allocated", "one-request", "at-once", "peaks", "speed"}


@pytest.mark.model
def test_every_pitfall_shows_and_is_caught(demo_model_dir: Path) -> None:
    findings = short("pitfalls", demo_model_dir)
    assert findings.figures["pitfalls.provoked"] == findings.figures["pitfalls.caught"] == len(findings.claims)
    found = {(claim.section, claim.verdict) for claim in findings.claims}
    certain = ("4.2", "4.5", "5.1, 5.6", "5.2a", "5.2b", "5.2c", "5.4a", "5.4b", "5.4d", "5.5", "5.6")
    assert {section for section, verdict in found if verdict is Verdict.CONFIRMED} >= set(certain)
    lenient = next(claim for claim in findings.claims if claim.section == "5.4c")
    assert lenient.verdict is Verdict.NOT_CONFIRMED
    assert "2 of 2 answers changed, 2 were the other prompt's answer" in lenient.measured
    assert "changed 0 of 2 answers" in lenient.measured
    (pitfalls,) = findings.tables
    assert all("NOT" not in row[3] for row in pitfalls.rows)
