"""draw_chart: one Chart as a PNG file.

Owns: the looks.
Does not: import matplotlib (cluster.bench.plot does) or know what is drawn.
Invariants: a chart of nothing is drawn too, empty; the file is small enough to be kept beside documents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.bench.plot import new_figure
from cluster.lab.findings import Chart

WIDTH, HEIGHT, DPI = 7.0, 3.6, 100
_BARS = 0.8  # of the room between two categories


def draw_chart(chart: Chart, path: Path) -> None:
    figure = new_figure(WIDTH, HEIGHT)
    axes = figure.add_subplot()
    if chart.kind == "bar":
        _bars(axes, chart)
    else:
        _lines(axes, chart)
    axes.set_title(chart.title, fontsize=10)
    axes.set_xlabel(chart.x_label, fontsize=9)
    axes.set_ylabel(chart.y_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", alpha=0.3)
    if len(chart.series) > 1:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def _lines(axes: Any, chart: Chart) -> None:
    draws = axes.step if chart.kind == "step" else axes.plot
    style: dict[str, Any] = {"where": "post"} if chart.kind == "step" else {"marker": "."}
    for series in chart.series:
        draws(series.x, series.y, label=series.label, linewidth=1.3, **style)
    if chart.log_x:
        axes.set_xscale("log", base=2)
        marks = sorted({x for series in chart.series for x in series.x})
        axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
        axes.minorticks_off()
    axes.set_ylim(bottom=min([0.0, *(y for series in chart.series for y in series.y)]))


def _bars(axes: Any, chart: Chart) -> None:
    width = _BARS / max(1, len(chart.series))
    for number, series in enumerate(chart.series):
        places = [index - _BARS / 2 + width * (number + 0.5) for index in range(len(series.y))]
        bars = axes.bar(places, series.y, width=0.95 * width, label=series.label)
        axes.bar_label(bars, fmt="%.3g", fontsize=7)
    axes.set_xticks(range(len(chart.x_ticks)), chart.x_ticks, fontsize=8)
