"""fleet_plot: one picture of a comparison of routing policies: mean and p90 TTFT, and hit rate, one bar per policy.

Owns: the drawing.
Does not: compute (fleet_report), or import matplotlib by itself (cluster.bench.plot).
Invariants: policies whose queues never ended are cut off at ten times the best, and their bars say their value.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.bench.plot import new_figure
from cluster.simulate.fleet_report import FleetReport


def draw_fleet(reports: Sequence[FleetReport], bound_s: float, title: str, path: Path) -> None:
    shown = [(report, report.ttft) for report in reports if report.ttft is not None]
    figure = new_figure(12, 4.5)
    names = [report.policy for report, _ in shown]
    columns = {
        "mean TTFT, s": [ttft.mean for _, ttft in shown],
        "p90 TTFT, s": [ttft.p90 for _, ttft in shown],
        "hit rate of prompt tokens": [report.hit_rate or 0.0 for report, _ in shown],
    }
    for place, (heading, values) in enumerate(columns.items(), start=1):
        axes = figure.add_subplot(1, 3, place)
        limit = min(max(values), 10 * min(values)) if "TTFT" in heading and values else max(values, default=1.0)
        bars = axes.barh(names[::-1], [min(value, limit) for value in values[::-1]], color="C0")
        axes.bar_label(bars, labels=[f"{value:.3g}" for value in values[::-1]], fontsize=8, padding=2)
        axes.set_xlim(0, limit * 1.15)
        axes.set_title(heading, fontsize=10)
        if heading.startswith("mean"):
            axes.axvline(bound_s, color="C3", linestyle="--", linewidth=1)
    figure.suptitle(f"{title}; dashed: clairvoyant bound", fontsize=10)
    figure.savefig(path, dpi=120)
