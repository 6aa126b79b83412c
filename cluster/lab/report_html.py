"""html: a LabReport as one HTML file that needs no other: styles and pictures are in it.

Owns: the layout and the escaping.
Does not: draw or write files (lab_run).
Invariants: nothing is loaded from anywhere; no scripts; text of an experiment is text, never markup.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from cluster.lab.findings import Findings, Verdict
from cluster.lab.lab_report import CLAIM_HEADER, LabReport, picture_name

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: 0.8rem 0; font-size: 14px; }
th, td { border: 1px solid #ddd; padding: 0.3rem 0.6rem; text-align: left; vertical-align: top; }
th { background: #f4f4f4; }
td.confirmed { background: #d9f2dd; } td.depends { background: #fdf1cc; } td.not-confirmed { background: #f9d8d6; }
img { max-width: 100%; } pre { background: #f7f7f7; padding: 0.8rem; overflow-x: auto; font-size: 13px; }
.warning { background: #f9d8d6; padding: 0.5rem 0.8rem; } .note { color: #666; font-size: 13px; }
"""


def html(report: LabReport, pictures: Mapping[str, bytes]) -> str:
    """`pictures`: PNG files by name."""
    return "\n".join(_document(report, pictures)) + "\n"


def _document(report: LabReport, pictures: Mapping[str, bytes]) -> Iterator[str]:
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>The lab\'s report</title>'
    yield f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head><body><h1>The lab\'s report</h1>'
    yield _paragraph(f"{report.note.text()} Model: {report.model}; {report.seconds:.0f} s.")
    if report.short:
        yield _paragraph("The short form, for tests: its figures are no measurements.", "warning")
    for outcome in report.failures:
        yield _paragraph(f"{outcome.name} failed: {outcome.failure}", "warning")
    yield f"<h2>Claims</h2>{_paragraph(report.verdicts + '.')}"
    rows = [(c.section, c.claim, c.expected, c.measured, c.verdict) for c in report.claims]
    yield from _table(CLAIM_HEADER, rows)
    for outcome in report.outcomes:
        if outcome.findings is not None:
            yield from _experiment(outcome.name, outcome.findings, pictures)
    yield "</body></html>"


def _experiment(name: str, found: Findings, pictures: Mapping[str, bytes]) -> Iterator[str]:
    yield f'<h2 id="{escape(name)}">{escape(name)}: {_text(found.title)}</h2>{_paragraph(found.summary)}'
    for table in found.tables:
        yield f"<h3>{_text(table.title)}</h3>"
        yield from _table(table.header, table.rows)
        if table.note:
            yield _paragraph(table.note, "note")
    for chart in found.charts:
        data = base64.b64encode(pictures[picture_name(name, chart.name)]).decode()
        yield f'<p><img alt="{escape(chart.title)}" src="data:image/png;base64,{data}"></p>'
        if chart.note:
            yield _paragraph(chart.note, "note")
    if found.text:
        drawn = found.text.strip("\n")
        yield f"<pre>{escape(drawn)}</pre>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"<table><tr>{''.join(f'<th>{_text(cell)}</th>' for cell in header)}</tr>"
    for row in rows:
        yield f"<tr>{''.join(map(_cell, row))}</tr>"
    yield "</table>"


def _cell(text: str) -> str:
    kind = f' class="{text.replace(" ", "-")}"' if text in tuple(Verdict) else ""
    return f"<td{kind}>{_text(text)}</td>"


def _paragraph(text: str, kind: str = "") -> str:
    return f"<p{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{_text(text)}</p>"


def _text(text: str) -> str:
    """Escaped, with `code` as such."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
