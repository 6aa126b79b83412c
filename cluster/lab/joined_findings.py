"""joined: the Findings of an experiment's parts as one, in their order.

Owns: joining.
Does not: judge or drop anything.
Invariants: two parts never have a figure, or a chart, of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.lab.findings import Findings


def joined(experiment: str, title: str, summary: str, parts: Sequence[Findings]) -> Findings:
    figures: dict[str, float | int | str | bool] = {}
    for part in parts:
        assert figures.keys().isdisjoint(part.figures), f"{part.experiment} repeats a figure"
        figures.update(part.figures)
    charts = tuple(chart for part in parts for chart in part.charts)
    assert len({chart.name for chart in charts}) == len(charts), "two charts have one name"
    return Findings(
        experiment=experiment,
        title=title,
        summary=summary,
        claims=tuple(claim for part in parts for claim in part.claims),
        tables=tuple(table for part in parts for table in part.tables),
        charts=charts,
        figures=figures,
        text="\n\n".join(part.text for part in parts if part.text),
    )
