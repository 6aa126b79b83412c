"""The report of made-up findings: order of the claims, failures, escaping, pictures, and the page in a browser."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.bench.machine import MachineNote
from cluster.lab.findings import Chart, Claim, Findings, Series, Table, Verdict
from cluster.lab.lab_report import LabReport, Outcome
from cluster.lab.lab_run import write_report
from cluster.lab.report_markdown import markdown

PNG_HEAD = b"\x89PNG\r\n\x1a\n"


def claim(section: str, verdict: Verdict = Verdict.CONFIRMED) -> Claim:
    return Claim(section, f"claim of {section}", "a | b", "<b>1</b> of `x`", verdict)


def chart(name: str, kind: str = "line", **options: object) -> Chart:
    series = (Series("one", (1.0, 2.0, 4.0), (3.0, 1.0, 2.0)), Series("two", (1.0, 2.0, 4.0), (1.0, 2.0, 0.5)))
    return Chart(name, f"title of {name}", "x", "y", series, kind=kind, **options)  # type: ignore[arg-type]


def a_report() -> LabReport:
    first = Findings(
        experiment="late",
        title="late & first",
        summary="a summary",
        claims=(claim("2.10"), claim("5.4b", Verdict.DEPENDS), claim("5.4a"), claim("1.2, 9.9")),
        tables=(Table("a table", ("a", "b"), (("1", "x|y"),), "a note"),),
        charts=(chart("lines"), chart("steps", "step"), chart("logs", log_x=True)),
        figures={"late.a": 1.5, "b": 2},
        text="drawn </pre> ``` text",
    )
    bars = chart("bars", "bar", x_ticks=("p", "q", "r"))
    second = Findings("early", "early", "none", (claim("intro", Verdict.NOT_CONFIRMED), claim("2.3")), charts=(bars,))
    outcomes = (
        Outcome("late", 1.0, first),
        Outcome("broken", 2.0, failure="ValueError: <oops>"),
        Outcome("early", 3.0, second),
    )
    return LabReport("demo", False, MachineNote("kvray lab all", {"cores": "2 cores"}, {"Python": "3"}), outcomes)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_report(a_report(), tmp_path)
    return tmp_path


def test_claims_come_in_the_articles_order_whoever_made_them() -> None:
    assert [c.section for c in a_report().claims] == ["intro", "1.2, 9.9", "2.3", "2.10", "5.4a", "5.4b"]


def test_json_has_figures_claims_failures_and_files() -> None:
    wire = a_report().to_json()
    assert wire["figures"] == {"late.a": 1.5, "late.b": 2}
    assert wire["failures"] == {"broken": "ValueError: <oops>"}
    assert [one["verdict"] for one in wire["claims"]].count("confirmed") == 4
    assert wire["experiments"]["late"]["charts"][0]["file"] == "late-lines.png"
    assert wire["experiments"]["broken"] == {"seconds": 2.0, "failure": "ValueError: <oops>"}


def test_markdown_has_the_claims_first_and_whole_tables() -> None:
    text = markdown(a_report())
    assert text.index("## Claims") < text.index("## late: ") < text.index("## early: ")
    assert "**broken failed:** ValueError: <oops>" in text
    assert "4 confirmed, 1 depends, 1 not confirmed." in text
    rows = [line for line in text.splitlines() if line.startswith("| 5.4b")]
    assert rows == ["| 5.4b | claim of 5.4b | a \\| b | <b>1</b> of `x` | **depends** |"]


def test_every_picture_of_the_markdown_is_a_small_png_beside_it(written: Path) -> None:
    named = re.findall(r"!\[.*?\]\((.+?)\)", (written / "report.md").read_text())
    assert named == ["late-lines.png", "late-steps.png", "late-logs.png", "early-bars.png"]
    for name in named:
        data = (written / name).read_bytes()
        assert data.startswith(PNG_HEAD) and len(data) < 60_000


def test_html_carries_the_same_pictures_and_shows_text_as_text(written: Path) -> None:
    page = (written / "report.html").read_text()
    carried = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,(.+?)"', page)]
    named = ["late-lines.png", "late-steps.png", "late-logs.png", "early-bars.png"]
    assert carried == [(written / name).read_bytes() for name in named]
    assert "&lt;b&gt;1&lt;/b&gt; of <code>x</code>" in page and "<b>1</b>" not in page
    assert "drawn &lt;/pre&gt; ``` text" in page
    assert '<td class="not-confirmed">not confirmed</td>' in page
    assert "broken failed: ValueError: &lt;oops&gt;" in page
    loaded = set(re.findall(r'(?:src|href)="(.{5})', page))
    assert loaded == {"data:"}


def test_a_browser_shows_all_pictures_without_complaint(
    written: Path, browser: Callable[[Path], tuple[str, str]]
) -> None:
    page = written / "report.html"
    count = "document.title = [...document.images].filter(i => i.complete && i.naturalWidth > 0).length"
    probe = written / "probe.html"
    probe.write_text(page.read_text() + f"<script>addEventListener('load', () => {{ {count} }})</script>")
    dom, said = browser(probe)
    assert re.search(r"<title>(.*?)</title>", dom.replace("\n", ""))[1] == "4"  # type: ignore[index]
    assert "CONSOLE" not in said, said


@pytest.fixture
def browser(tmp_path: Path) -> Callable[[Path], tuple[str, str]]:
    """A page's document after loading, and what the browser wrote to its log."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("needs Chromium (Debian: apt install chromium)")

    def show(page: Path) -> tuple[str, str]:
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        switches = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", profile, "--dump-dom"]
        done = subprocess.run(
            [found, *switches, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout, done.stderr

    return show
