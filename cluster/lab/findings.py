"""Findings: what one experiment of the lab measured: claims judged, tables, charts, and the bare figures.

Owns: these values and what an experiment is given (LabContext).
Does not: run experiments (one module each), draw or write (cluster.lab.report, cluster.lab.charts).
Invariants: every figure comes from the run that made the Findings; a claim that fails is told as one that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal


class Verdict(StrEnum):
    CONFIRMED = "confirmed"
    DEPENDS = "depends"
    NOT_CONFIRMED = "not confirmed"


@dataclass(frozen=True, slots=True)
class Claim:
    """section: of the article.  expected: what it says follows.  measured: one sentence, with figures."""

    section: str
    claim: str
    expected: str
    measured: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """kind: `bar` takes its categories from `x_ticks`, one per x; `step` holds each value until the next."""

    name: str  # of the file, without its ending
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    kind: Literal["line", "step", "bar"] = "line"
    x_ticks: tuple[str, ...] = ()
    log_x: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """figures: for machines, by dotted name.  text: preformatted, such as drawn block tables."""

    experiment: str
    title: str
    summary: str
    claims: tuple[Claim, ...] = ()
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    figures: Mapping[str, float | int | str | bool] = field(default_factory=dict)
    text: str = ""


def _silent(_phase: str, _share: float) -> None:
    pass


@dataclass(frozen=True, slots=True)
class LabContext:
    """short: a form of seconds, for tests; its figures are no measurements.  progress(phase, share 0 to 1)."""

    model_dir: Path
    short: bool = False
    threads: int | None = None
    seed: int = 0
    progress: Callable[[str, float], None] = _silent


Experiment = Callable[[LabContext], Findings]
