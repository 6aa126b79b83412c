"""LabReport: what a run of the lab has to tell: every experiment's findings or failure, the machine, the command.

Owns: these values, the order of the claims, and the report as JSON.
Does not: lay it out (report_markdown, report_html) or write files (lab_run).
Invariants: a failed experiment is in the report as one; claims come in the article's order, whoever made them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from cluster.bench.machine import MachineNote
from cluster.lab.findings import Claim, Findings, Verdict

CLAIM_HEADER = ("section", "claim", "expected", "measured", "verdict")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One experiment. Either `findings` or `failure`, the reason in one line."""

    name: str
    seconds: float
    findings: Findings | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class LabReport:
    model: str
    short: bool
    note: MachineNote
    outcomes: tuple[Outcome, ...]

    @property
    def seconds(self) -> float:
        return sum(outcome.seconds for outcome in self.outcomes)

    @property
    def findings(self) -> tuple[Findings, ...]:
        return tuple(outcome.findings for outcome in self.outcomes if outcome.findings is not None)

    @property
    def failures(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.findings is None)

    @property
    def claims(self) -> tuple[Claim, ...]:
        return in_order(claim for found in self.findings for claim in found.claims)

    @property
    def verdicts(self) -> str:
        """How many claims came out how."""
        counts = ((verdict, sum(c.verdict is verdict for c in self.claims)) for verdict in Verdict)
        return ", ".join(f"{count} {verdict}" for verdict, count in counts)

    def to_json(self) -> dict[str, Any]:
        """figures: of all experiments, each behind its experiment's name."""
        return {
            "model": self.model,
            "short": self.short,
            "command": self.note.command,
            "machine": self.note.machine,
            "versions": self.note.versions,
            "seconds": round(self.seconds, 1),
            "claims": [asdict(claim) for claim in self.claims],
            "failures": {outcome.name: outcome.failure for outcome in self.failures},
            "figures": {key: value for outcome in self.outcomes for key, value in _figures(outcome).items()},
            "experiments": {outcome.name: _experiment(outcome) for outcome in self.outcomes},
        }


def in_order(claims: Iterable[Claim]) -> tuple[Claim, ...]:
    return tuple(sorted(claims, key=lambda claim: _place(claim.section)))


def picture_name(experiment: str, chart: str) -> str:
    return f"{experiment}-{chart.removeprefix(f'{experiment}-')}.png"


def _figures(outcome: Outcome) -> dict[str, float | int | str | bool]:
    if outcome.findings is None:
        return {}
    start = f"{outcome.name}."
    return {start + key.removeprefix(start): value for key, value in outcome.findings.figures.items()}


def _experiment(outcome: Outcome) -> dict[str, Any]:
    found = outcome.findings
    if found is None:
        return {"seconds": round(outcome.seconds, 1), "failure": outcome.failure}
    return {
        "seconds": round(outcome.seconds, 1),
        "title": found.title,
        "summary": found.summary,
        "tables": [asdict(table) for table in found.tables],
        "charts": [asdict(chart) | {"file": picture_name(outcome.name, chart.name)} for chart in found.charts],
    }


def _place(section: str) -> tuple[list[tuple[int, str]], str]:
    """By the first section named: 2.3 before 2.10, 5.4a before 5.4b, and what has no number first."""
    first = section.split(",")[0].strip()
    return [(int(number), letter) for number, letter in re.findall(r"(\d+)([a-z]?)", first)], section
