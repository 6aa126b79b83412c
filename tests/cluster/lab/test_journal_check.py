"""The journal experiment: equal runs, and every change at its first block."""

from __future__ import annotations

from pathlib import Path

from cluster.lab.findings import LabContext, Verdict
from cluster.lab.journal import record
from cluster.lab.journal_check import engine_journal, first_broken_invariant, run
from worker.kvcache.block_journal import BlockAction, diff


def test_the_findings_say_where_each_change_acts() -> None:
    findings = run(LabContext(model_dir=Path("unused")))
    figures = findings.figures
    assert [figures[f"{name}.equal"] for name in ("same", "engine_same")] == [True, True]
    changes = ("engine_order", "partial_off", "head_first", "leak")
    assert [figures[f"{name}.equal"] for name in changes] == [False] * 4
    assert {claim.verdict for claim in findings.claims} == {Verdict.CONFIRMED}
    assert "first difference at entry" in findings.text


def test_a_leak_shows_as_a_ref_count_that_is_one_too_high() -> None:
    from cluster.lab.changed_managers import LeakyManager

    difference = diff(record(), record(manager_class=LeakyManager, check=False))
    assert difference is not None and difference.a is not None and difference.b is not None
    assert difference.b.action is BlockAction.FREE
    assert difference.b.refs == difference.a.refs + 1
    assert "ref counts differ from held references" in first_broken_invariant(0)


def test_an_engines_journal_has_forks_copies_and_evictions() -> None:
    assert {entry.action for entry in engine_journal(0)} == set(BlockAction)
