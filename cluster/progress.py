"""ModelProgress: rich progress bars for fetching and converting a model.

Owns: the display.  Does not: do the work; `resolve_model` reports (phase, share) to it.
Invariants: nothing is drawn when nothing has to be done; output goes to stderr.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cluster.model_source import resolve_model


def resolve_with_progress(model: str, console: Console) -> Path:
    """`resolve_model` with one bar per phase."""
    columns = (TextColumn("{task.description:<10}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    progress = Progress(*columns, TimeElapsedColumn(), console=console)
    bars: dict[str, TaskID] = {}

    def report(phase: str, share: float) -> None:
        progress.start()  # only now: a Progress that stops prints a line even when it has no bars
        if phase not in bars:
            bars[phase] = progress.add_task(phase, total=1.0)
        progress.update(bars[phase], completed=share)

    try:
        return resolve_model(model, report)
    finally:
        if bars:
            progress.stop()
