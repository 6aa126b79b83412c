"""run_lab: experiments one after the other, with progress, and the report of them all.

    OUT/report.md  report.html  report.json     and one PNG file per chart beside them

Owns: the order, the bars, failures, and the files.
Does not: measure (the experiments) or lay out (report_markdown, report_html, charts).
Invariants: a failed experiment loses nobody else's findings and makes the exit code 1; pictures are asked for before
minutes are spent.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.bench.machine import describe_machine
from cluster.core.errors import ConfigError
from cluster.lab.charts import draw_chart
from cluster.lab.experiments import EXPERIMENTS, Entry
from cluster.lab.findings import LabContext
from cluster.lab.lab_report import CLAIM_HEADER, LabReport, Outcome, picture_name
from cluster.lab.report_html import html
from cluster.lab.report_markdown import markdown
from cluster.progress import resolve_with_progress

logger = logging.getLogger(__name__)

_COLOURS = {"confirmed": "green", "depends": "yellow", "not confirmed": "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabOptions:
    model: str = "demo"
    out: Path = Path("lab-report")
    short: bool = False
    threads: int | None = None
    seed: int = 0


def run_lab(names: Sequence[str], options: LabOptions, *, as_json: bool = False) -> int:
    require_pictures()
    console = Console(stderr=True)
    make_folder(options.out)
    model_dir = resolve_with_progress(options.model, console)
    context = LabContext(model_dir, short=options.short, threads=options.threads, seed=options.seed)
    outcomes = run_experiments({name: EXPERIMENTS[name] for name in names}, context, console)
    model = options.model if options.model == "demo" else model_dir.name
    report = LabReport(model, options.short, describe_machine(sys.argv[1:]), outcomes)
    write_report(report, options.out)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        show(report, Console())
    console.print(f"report: {options.out / 'report.html'}", highlight=False, markup=False, soft_wrap=True)
    return 1 if report.failures else 0


def run_experiments(entries: dict[str, Entry], context: LabContext, console: Console) -> tuple[Outcome, ...]:
    columns = (TextColumn("{task.fields[name]:<10}"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bars = {name: progress.add_task("waiting", total=1.0, start=False, name=name) for name in entries}
        outcomes = []
        for name, entry in entries.items():
            bar = bars[name]

            def report(phase: str, share: float, bar: object = bar) -> None:
                progress.update(bar, description=phase, completed=share)  # type: ignore[arg-type]

            progress.start_task(bar)
            outcomes.append(run_one(name, entry, context, report))
            progress.update(bar, description="failed" if outcomes[-1].failure else "done", completed=1.0)
            progress.stop_task(bar)
            if not console.is_terminal:  # where no bars are seen
                console.print(f"{name}: {outcomes[-1].seconds:.0f} s", highlight=False)
    return tuple(outcomes)


def run_one(name: str, entry: Entry, context: LabContext, report: Callable[[str, float], None]) -> Outcome:
    started = time.perf_counter()
    try:
        report("starting", 0.0)
        findings = entry.load()(replace(context, progress=report))
    except Exception as error:  # whatever it is, the other experiments are worth having
        logger.exception("experiment %s failed", name)
        failure = f"{type(error).__name__}: {error}"
        return Outcome(name, time.perf_counter() - started, failure=failure)
    return Outcome(name, time.perf_counter() - started, findings)


def write_report(report: LabReport, out: Path) -> None:
    """The figures first, in case a picture cannot be drawn."""
    (out / "report.json").write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    (out / "report.md").write_text(markdown(report), encoding="utf-8")
    pictures = {}
    for outcome in report.outcomes:
        for chart in outcome.findings.charts if outcome.findings is not None else ():
            path = out / picture_name(outcome.name, chart.name)
            draw_chart(chart, path)
            pictures[path.name] = path.read_bytes()
    (out / "report.html").write_text(html(report, pictures), encoding="utf-8")


def show(report: LabReport, console: Console) -> None:
    table = Table(title=f"{report.verdicts}; {report.seconds:.0f} s", show_lines=True)
    for heading in CLAIM_HEADER:
        table.add_column(heading)
    for claim in report.claims:
        verdict = f"[{_COLOURS[claim.verdict]}]{claim.verdict}[/]"
        table.add_row(*(_plain(text) for text in (claim.section, claim.claim, claim.expected, claim.measured)), verdict)
    console.print(table, highlight=False)
    for outcome in report.failures:
        console.print(f"{outcome.name} failed: {outcome.failure}", style="red", highlight=False, markup=False)


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be made: {error.strerror}") from None


def require_pictures() -> None:
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise ConfigError("the lab's pictures need matplotlib: pip install 'kvray[bench]'") from None


def _plain(text: str) -> str:
    return text.replace("[", "\\[")
