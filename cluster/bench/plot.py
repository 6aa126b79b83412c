"""plot: one picture of a comparison: each workload's main figure, one bar per peer, with its range.

Owns: which figure stands for a workload, and the drawing.
Does not: compute (summary).
Invariants: matplotlib is imported only here and only when a picture was asked for; no display is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.bench.report import HEADINGS
from cluster.bench.summary import Spread, Summary
from cluster.core.errors import ConfigError

MAIN_FIGURE = {
    "W1": ("decode_tps", "higher is better"),
    "W2": ("wall_s", "lower is better"),
    "W2_off": ("wall_s", "lower is better"),
    "W3": ("wall_s", "lower is better"),
    "W4": ("wall_s", "lower is better"),
    "W5": ("prefill_tps", "higher is better"),
}
_COLUMNS = 3


def require_matplotlib() -> None:
    """ConfigError when there is none; ask before hours of runs."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise ConfigError("--png needs matplotlib: pip install 'kvray[bench]'") from None


def new_figure(width: float, height: float) -> Any:
    """Inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw(summaries: Sequence[Summary], path: Path) -> None:
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        if summary.workload in MAIN_FIGURE and summary.median(MAIN_FIGURE[summary.workload][0]) is not None:
            groups.setdefault(summary.workload, []).append(summary)
    peers = list(dict.fromkeys(summary.peer for group in groups.values() for summary in group))
    rows = max(1, -(-len(groups) // _COLUMNS))
    figure = new_figure(4.5 * _COLUMNS, 3.2 * rows)
    for place, (workload, group) in enumerate(groups.items(), start=1):
        _draw_workload(figure.add_subplot(rows, _COLUMNS, place), workload, group, peers)
    figure.savefig(path, dpi=120)


def _draw_workload(axes: Any, workload: str, group: list[Summary], peers: list[str]) -> None:
    name, direction = MAIN_FIGURE[workload]
    for summary in group:
        spread = summary.figures[name]
        assert isinstance(spread, Spread)
        error = [[spread.median - spread.low], [spread.high - spread.median]]
        colour = f"C{peers.index(summary.peer) % 10}"
        bars = axes.bar([summary.peer], [spread.median], yerr=error, capsize=4, color=colour)
        axes.bar_label(bars, fmt="%.3g", label_type="center", color="white")
    axes.set_title(f"{workload}: {HEADINGS[name]} ({direction})", fontsize=10)
    axes.tick_params(axis="x", labelrotation=20, labelsize=8)
