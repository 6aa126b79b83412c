"""markdown: a LabReport as one Markdown document; its pictures are files beside it.

Owns: the order (claims first) and the notation.
Does not: draw or write files (lab_run).
Invariants: the text of an experiment cannot break a table or end a code block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cluster.lab.findings import Claim, Findings, Table
from cluster.lab.lab_report import CLAIM_HEADER, LabReport, picture_name


def markdown(report: LabReport) -> str:
    return "\n".join(_document(report)) + "\n"


def claims_table(claims: Sequence[Claim]) -> str:
    rows = [(c.section, c.claim, c.expected, c.measured, f"**{c.verdict}**") for c in claims]
    return "\n".join(_table(CLAIM_HEADER, rows))


def _document(report: LabReport) -> Iterator[str]:
    yield "# The lab's report"
    yield ""
    yield f"{report.note.text()} Model: {report.model}; {report.seconds:.0f} s."
    if report.short:
        yield ""
        yield "**The short form, for tests: its figures are no measurements.**"
    for outcome in report.failures:
        yield ""
        yield f"**{outcome.name} failed:** {_line(outcome.failure)}"
    yield ""
    yield "## Claims"
    yield ""
    yield f"{report.verdicts}."
    yield ""
    yield claims_table(report.claims)
    for outcome in report.outcomes:
        if outcome.findings is not None:
            yield from _experiment(outcome.name, outcome.findings)


def _experiment(name: str, found: Findings) -> Iterator[str]:
    yield ""
    yield f"## {name}: {found.title}"
    yield ""
    yield found.summary
    for table in found.tables:
        yield from _titled_table(table)
    for chart in found.charts:
        yield ""
        yield f"![{chart.title}]({picture_name(name, chart.name)})"
        if chart.note:
            yield ""
            yield chart.note
    if found.text:
        yield ""
        yield "````text"
        yield found.text.strip("\n")
        yield "````"


def _titled_table(table: Table) -> Iterator[str]:
    yield ""
    yield f"**{table.title}**"
    yield ""
    yield from _table(table.header, table.rows)
    if table.note:
        yield ""
        yield table.note


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield _row(header)
    yield f"|{'|'.join('---' for _ in header)}|"
    for row in rows:
        yield _row(row)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_line(cell) for cell in cells)} |"


def _line(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
