"""Row and its markdown table: what a section found, in a form that goes into an issue.

Owns: the four verdicts, one line of JSON per row (how a child process hands it over), the table and the exit code.
Does not: measure or judge.
Invariants: a row without a number says why; no cell breaks the table.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

Verdict = Literal["ok", "warning", "skipped", "failed"]


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    verdict: Verdict
    found: str

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Row | None:
        """None when the line is something else that was printed."""
        try:
            found = json.loads(line)
        except ValueError:
            return None
        if not isinstance(found, dict) or set(found) != {"what", "verdict", "found"}:
            return None
        return cls(**found) if found["verdict"] in get_args(Verdict) else None


Results = Sequence[tuple[str, Sequence[Row]]]  # section, its rows


def table(results: Results) -> str:
    lines = ["| section | what | verdict | found |", "|---|---|---|---|"]
    for section, rows in results:
        for row in rows:
            verdict = f"**{row.verdict}**" if row.verdict == "failed" else row.verdict
            lines.append(f"| {section} | {_cell(row.what)} | {verdict} | {_cell(row.found)} |")
    return "\n".join(lines)


def summary(results: Results, seconds: float) -> str:
    counts = Counter(row.verdict for _, rows in results for row in rows)
    return f"{', '.join(f'{counts[verdict]} {verdict}' for verdict in get_args(Verdict))}; {seconds:.0f} s"


def exit_code(results: Results) -> int:
    return 1 if any(row.verdict == "failed" for _, rows in results for row in rows) else 0


def first_line(text: object) -> str:
    return str(text).strip().partition("\n")[0]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
