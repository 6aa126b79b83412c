"""`python -m benchmarks.refresh_lab_docs REPORT_DIR...`: the figures and pictures of a lab run into the documents.

A figure in a document stands between two comments, the first of which names it and, behind a colon, its format:

    saves <!--=memory.saving:.0%-->74%<!--/--> of the KV memory

The names are those of "figures" in report.json; later folders win. docs/lab_figures.json keeps what was filled in, with
the machine and the command, and a test compares the documents with it. README.md gets the claims table between
`<!-- lab claims -->` and `<!-- /lab claims -->`, when it has these two lines.

Owns: the marks, and copying the pictures that the documents show.
Does not: measure (kvray lab all) or know what the documents say.
Invariants: a figure that no report has stays as it is and is named; nothing outside the marks changes.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.lab.findings import Claim, Verdict
from cluster.lab.lab_report import in_order
from cluster.lab.report_markdown import claims_table

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("docs/how-it-works.md", "docs/how-it-works.zh.md")
FIGURES = "docs/lab_figures.json"
MARK = re.compile(r"<!--=([\w.-]+)(?::([^>]*?))?-->(.*?)<!--/-->", re.S)
PICTURE = re.compile(r"\(pictures/([\w.-]+\.png)\)")
CLAIMS = re.compile(r"(<!-- lab claims -->\n).*?(\n<!-- /lab claims -->)", re.S)

Figures = Mapping[str, float | int | str | bool]


def main(folders: list[str]) -> int:
    reports = [(Path(folder), json.loads((Path(folder) / "report.json").read_text("utf-8"))) for folder in folders]
    kept = ROOT / FIGURES
    stored: dict[str, Any] = json.loads(kept.read_text("utf-8")) if kept.exists() else {"figures": {}}
    for _, report in reports:
        stored = {name: report[name] for name in ("model", "short", "command", "machine", "versions")} | {
            "figures": stored["figures"] | report["figures"]
        }
    missing: set[str] = set()
    for name in DOCUMENTS:
        path = ROOT / name
        if path.exists():
            text = path.read_text("utf-8")
            missing |= unknown(text, stored["figures"])
            path.write_text(filled(text, stored["figures"]), "utf-8")
            missing |= _copy_pictures(text, [folder for folder, _ in reports])
    used = {mark[0] for name in DOCUMENTS if (ROOT / name).exists() for mark in MARK.findall((ROOT / name).read_text())}
    stored["figures"] = {name: value for name, value in sorted(stored["figures"].items()) if name in used}
    kept.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")
    if reports:
        _claims([claim for _, report in reports for claim in report["claims"]])
    for name in sorted(missing):
        print(f"not in these reports: {name}", file=sys.stderr)
    return 1 if missing else 0


def filled(text: str, figures: Figures) -> str:
    """`text` with every known figure."""

    def value(mark: re.Match[str]) -> str:
        name, form = mark[1], mark[2] or ""
        if name not in figures:
            return mark[0]
        colon = f":{form}" if form else ""
        return f"<!--={name}{colon}-->{format(figures[name], form)}<!--/-->"

    return MARK.sub(value, text)


def unknown(text: str, figures: Figures) -> set[str]:
    return {mark[0] for mark in MARK.findall(text) if mark[0] not in figures}


def _copy_pictures(text: str, folders: list[Path]) -> set[str]:
    missing = set()
    for name in PICTURE.findall(text):
        source = next((folder / name for folder in reversed(folders) if (folder / name).exists()), None)
        if source is not None:
            (ROOT / "docs" / "pictures").mkdir(exist_ok=True)
            shutil.copy(source, ROOT / "docs" / "pictures" / name)
        elif not (ROOT / "docs" / "pictures" / name).exists():
            missing.add(name)
    return missing


def _claims(found: list[dict[str, Any]]) -> None:
    claims = in_order(Claim(**{**claim, "verdict": Verdict(claim["verdict"])}) for claim in found)
    path = ROOT / "README.md"
    text = path.read_text("utf-8")
    path.write_text(CLAIMS.sub(lambda mark: f"{mark[1]}\n{claims_table(claims)}\n{mark[2]}", text), "utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
