"""Pitfall: one mistake of the article's section 5, provoked in a sandbox, and what catches or cures it.

Owns: the value, the error that a check raised, and its row and claim.
Does not: provoke anything (book_pitfalls, key_pitfalls, kv_pitfalls, process_pitfalls).
Invariants: what a check said is quoted from the exception that it raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.lab.findings import Claim, Findings, Table, Verdict

HEADER = ("section", "pitfall", "what happens", "caught by", "remedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pitfall:
    """symptom: what the article says follows.  happened, caught: with this run's figures.  verdict: of the claim."""

    section: str
    name: str
    symptom: str
    happened: str
    caught: str
    remedy: str
    verdict: Verdict

    @property
    def claim(self) -> Claim:
        return Claim(self.section, self.name, self.symptom, f"{self.happened}; {self.caught}", self.verdict)

    @property
    def row(self) -> tuple[str, ...]:
        return (self.section, self.name, self.happened, self.caught, self.remedy)


def caught_error(action: Callable[[], object]) -> str | None:
    """What the check inside `action` said; None when nothing was caught."""
    try:
        action()
    except AssertionError as error:
        return str(error)
    return None


def quoted(said: str | None, check: str) -> str:
    return f"{check}: `{said}`" if said else f"NOT caught by {check}"


def pitfall_findings(pitfalls: Sequence[Pitfall], **more: object) -> Findings:
    """One part of the experiment; `more`: charts, figures."""
    table = Table("", HEADER, tuple(one.row for one in pitfalls))
    return Findings("pitfalls", "", "", tuple(one.claim for one in pitfalls), (table,), **more)  # type: ignore[arg-type]


def yes(shown: bool) -> Verdict:
    return Verdict.CONFIRMED if shown else Verdict.NOT_CONFIRMED
