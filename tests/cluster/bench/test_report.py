"""Tables of text: what is unknown is not zero, what was dropped is counted, and Markdown stays a table."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from cluster.bench.machine import MachineNote, describe_machine, parse_cpu
from cluster.bench.machine_probe import LimitReading, MachineProbe
from cluster.bench.measures import Figure
from cluster.bench.model_costs import ModelCosts
from cluster.bench.peer import PeerFacts
from cluster.bench.plot import draw
from cluster.bench.report import ReportTable, number, to_markdown, to_rich, workload_tables
from cluster.bench.results import Results
from cluster.bench.run_meter import Usage
from cluster.bench.run_record import RunRecord, Verdict
from cluster.bench.summary import summarise
from cluster.core.errors import ConfigError

COSTS = ModelCosts(dtype="bfloat16", layers=2, layer_weights=900, head_weights=100, attention_width=8)


def run(
    peer: str,
    workload: str,
    verdict: Verdict = Verdict.KEPT,
    *,
    usage: Usage = Usage(noise=0.02, peak_rss=512 * 2**20),  # noqa: B008 - frozen
    asked: int = 0,
    reason: str = "",
    load: float | None = None,
    **figures: Figure,
) -> RunRecord:
    return RunRecord(
        peer=peer,
        workload=workload,
        repetition=0,
        attempt=0,
        verdict=verdict,
        at=0.0,
        figures=figures,
        usage=usage,
        asked_tokens=asked,
        load_asked=load,
        load_taken=load,
        reason=reason,
    )


def results(*records: RunRecord, probe: MachineProbe | None = None) -> Results:
    return Results(
        note=MachineNote("kvray bench --engine", {"cpu": "a CPU"}, {"Python": "3.11"}),
        peers=[PeerFacts(name="a", kind="engine", address="", model="m", pid=5, start_s=1.5, ready_rss=2**30)],
        records=records,
        probe=probe or MachineProbe(None, 2),
    )


def table_of(*records: RunRecord) -> ReportTable:
    (table,) = workload_tables(summarise(records), records)
    return table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (31744, "31,744"),
        (196.4, "196"),
        (44.42, "44.4"),
        (7.437, "7.44"),
        (0.1234, "0.123"),
        (0.0624, "0.0624"),
    ],
)
def test_three_digits_that_matter(value: float, text: str) -> None:
    assert number(value) == text


def test_what_a_server_does_not_report_is_not_zero() -> None:
    none, unknown = run("a", "W3", wall_s=2.0, cached_tokens=0), run("b", "W3", wall_s=2.0, cached_tokens=None)
    row_a, row_b = table_of(none, unknown).rows
    column = list(table_of(none).headings).index("cached tokens")
    assert (row_a[column], row_b[column]) == ("0", "not reported")


def test_ranges_counts_turns_and_memory() -> None:
    table = table_of(
        run("a", "W3", wall_s=2.0, ttft_per_turn_s=(0.1, 0.25)),
        run("a", "W3", wall_s=4.0, ttft_per_turn_s=(0.3, 0.35)),
        run("a", "W3", Verdict.NOISY, wall_s=9.0),
        run("b", "W3", Verdict.FAILED, reason="HTTP 500: no"),
    )
    rows = {row[0]: dict(zip(table.headings, row, strict=True)) for row in table.rows}
    assert rows["a"]["runs kept"] == "2 of 3"
    assert rows["a"]["wall s"] == "3.00 (2.00-4.00)"
    assert rows["a"]["TTFT per turn s"] == "0.20 / 0.30"
    assert rows["b"]["runs kept"] == "0 of 1"
    assert rows["b"]["wall s"] == "-"
    assert table.notes == ["b: a run failed: HTTP 500: no"]
    memory = table_of(run("a", "W4", wall_s=1.0))
    assert memory.rows[0][list(memory.headings).index("peak RSS MiB")] == "512"


def test_short_answers_and_background_load_are_told() -> None:
    table = table_of(run("a", "W1", wall_s=1.0, answer_tokens=100, asked=128, load=0.58))
    assert table.notes == ["a: answered with 100 tokens where 128 were asked for"]
    assert (table.headings[-1], table.rows[0][-1]) == ("background", "0.580")


def test_unknown_noise() -> None:
    table = table_of(run("a", "W1", usage=Usage(), wall_s=1.0))
    assert table.rows[0][list(table.headings).index("noise")] == "unknown"


def test_shares_need_limits() -> None:
    records = (run("a", "W1", decode_tps=50.0), run("a", "W5", ttft_s=2.0, prompt_tokens=10))
    assert "not measured" in results(*records).to_markdown()
    assert results(*records).to_wire()["shares_of_floor"] == {}
    flops = COSTS.prefill_flops(10)
    readings = [LimitReading(0.0, bandwidth, float(flops)) for bandwidth in (100e3, 200e3, 900e3)]
    probe = MachineProbe(COSTS, 2, readings=readings)
    shares = results(*records, probe=probe).to_wire()["shares_of_floor"]
    assert shares == {"a": {"W1 decode": pytest.approx(0.5), "W5 prefill": pytest.approx(0.5)}}
    assert "| a | 50 % | 50 % |" in results(*records, probe=probe).to_markdown()


def test_markdown_is_a_table() -> None:
    text = to_markdown(ReportTable("T", ["peer", "wall s"], [["a|b", "1"]], ["a note"]))
    assert text.splitlines() == ["**T**", "", "| peer | wall s |", "|---|---:|", "| a/b | 1 |", "", "a note"]


def test_rich_shows_the_same() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(to_rich(ReportTable("T", ["peer", "wall s"], [["a", "1"]], ["a note"])))
    assert isinstance(console.file, io.StringIO)
    assert all(part in console.file.getvalue() for part in ("T", "wall s", "a note"))


def test_files_have_every_record(tmp_path: Path) -> None:
    found = results(run("a", "W1", decode_tps=5.0), run("a", "W1", Verdict.FAILED, reason="gone"))
    found.write(json_file=tmp_path / "r.json", markdown=tmp_path / "r.md", png=None)
    read = json.loads((tmp_path / "r.json").read_text())
    assert [record["verdict"] for record in read["records"]] == ["kept", "failed"]
    assert read["summary"][0]["figures"]["decode_tps"] == {"median": 5.0, "min": 5.0, "max": 5.0}
    assert (tmp_path / "r.md").read_text().startswith("`kvray bench --engine` on a CPU; Python 3.11.")
    with pytest.raises(ConfigError, match="cannot be written"):
        found.write(json_file=tmp_path, markdown=None, png=None)


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [run(p, w, decode_tps=5.0, wall_s=1.0) for w in ("W1", "W3") for p in ("a", "b")]
    draw(summarise(records), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_machine_without_names_of_hosts(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2 avx512f\n\nprocessor\t: 1\n"
    )
    (tmp_path / "meminfo").write_text("MemTotal:       25165824 kB\n")
    note = describe_machine(["bench", "--engine"], tmp_path)
    assert note.command == "kvray bench --engine"
    assert "A CPU" in note.text() and "24 GiB" in note.text() and "Python 3." in note.text()
    assert parse_cpu("flags : fpu\n")[1] == []
