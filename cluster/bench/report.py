"""Report: summaries and machine limits as tables of text, one per workload, and those tables as rich or Markdown.

Owns: which figures each workload shows, their headings and their rounding.
Does not: compute figures (measures, summary) or write files (bench_command).
Invariants: "not reported" is what a server does not say and "-" what could not be had; neither looks like zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from cluster.bench.machine_probe import MachineProbe
from cluster.bench.peer import PeerFacts
from cluster.bench.run_record import RunRecord, Verdict
from cluster.bench.summary import Spread, Summary

_SHARING = ("wall_s", "ttft_mean_s", "ttft_median_s", "cached_tokens", "total_tps")
COLUMNS: dict[str, tuple[str, ...]] = {
    "W1": ("decode_tps", "e2e_tps", "ttft_s", "wall_s"),
    "W2": _SHARING,
    "W2_off": _SHARING,
    "W3": ("wall_s", "ttft_median_s", "ttft_per_turn_s", "cached_tokens", "out_tps"),
    "W4": ("wall_s", "out_tps", "total_tps", "ttft_mean_s", "ttft_median_s", "peak_rss"),
    "W5": ("ttft_s", "prefill_tps", "decode_tps", "wall_s"),
}
HEADINGS = {
    "decode_tps": "decode tok/s",
    "e2e_tps": "end to end tok/s",
    "prefill_tps": "prefill tok/s",
    "out_tps": "out tok/s",
    "total_tps": "total tok/s",
    "ttft_s": "TTFT s",
    "ttft_mean_s": "TTFT mean s",
    "ttft_median_s": "TTFT median s",
    "ttft_per_turn_s": "TTFT per turn s",
    "wall_s": "wall s",
    "cached_tokens": "cached tokens",
    "peak_rss": "peak RSS MiB",
    "noise": "noise",
    "load_taken": "background",
}
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Rows of text; the first column names a thing and the others are figures."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default=())


def number(value: float) -> str:
    """Three digits that matter, and never an exponent."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    decimals = 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.1 else 4
    return f"{value:.{decimals}f}"


def cell(name: str, summary: Summary) -> str:
    if summary.kept == 0 or name not in summary.figures:
        return "-"
    value = summary.figures[name]
    if value is None:
        return {"cached_tokens": "not reported", "noise": "unknown"}.get(name, "-")
    if isinstance(value, tuple):
        return " / ".join(f"{median:.2f}" for median in value)
    scale = 1 / _MIB if name == "peak_rss" else 1
    text = number(scale * value.median)
    return text if value.low == value.high else f"{text} ({number(scale * value.low)}-{number(scale * value.high)})"


def workload_tables(summaries: Iterable[Summary], records: Sequence[RunRecord]) -> list[ReportTable]:
    by_workload: dict[str, list[Summary]] = {}
    for summary in summaries:
        by_workload.setdefault(summary.workload, []).append(summary)
    return [_workload_table(name, group, records) for name, group in by_workload.items()]


def _workload_table(name: str, group: list[Summary], records: Sequence[RunRecord]) -> ReportTable:
    columns = [*COLUMNS.get(name, ("wall_s", "out_tps")), "noise"]
    if any("load_taken" in summary.figures for summary in group):
        columns.append("load_taken")
    rows = [
        [summary.peer, f"{summary.kept} of {summary.runs}", *(cell(column, summary) for column in columns)]
        for summary in group
    ]
    notes = dict.fromkeys(_note(record) for record in records if record.workload == name)
    headings = ["peer", "runs kept", *(HEADINGS[column] for column in columns)]
    return ReportTable(name, headings, rows, [note for note in notes if note])


def _note(record: RunRecord) -> str:
    if record.verdict is Verdict.FAILED:
        return f"{record.peer}: a run failed: {record.reason}"
    if record.is_short:
        answered = record.figures["answer_tokens"]
        return f"{record.peer}: answered with {answered} tokens where {record.asked_tokens} were asked for"
    return ""


def limits_table(probe: MachineProbe) -> ReportTable:
    rows = []
    if probe.costs is not None:
        dtype, threads = probe.costs.dtype, probe.threads
        read = f"memory read, {probe.costs.packed_bytes / 1e6:.0f} MB, {threads} threads"
        rows.append([f"{read}, GB/s", _limit([reading.bandwidth / 1e9 for reading in probe.readings])])
        multiply = f"{dtype} matrix product, {threads} threads, GFLOP/s"
        rows.append([multiply, _limit([reading.gemm_rate / 1e9 for reading in probe.readings])])
    notes = [f"not measured: {probe.missing}"] if probe.missing else []
    return ReportTable("Machine limits", ["what", f"median (min-max) of {len(probe.readings)}"], rows, notes)


def _limit(values: list[float]) -> str:
    if not values:
        return "not measured"
    spread = Spread.of(values)
    return f"{number(spread.median)} ({number(spread.low)}-{number(spread.high)})"


def shares_of_floor(summaries: Iterable[Summary], probe: MachineProbe) -> dict[str, dict[str, float]]:
    """peer -> figure -> share of what the machine's limits allow; empty when they were not measured."""
    costs, bandwidth, gemm_rate = probe.costs, probe.bandwidth, probe.gemm_rate
    shares: dict[str, dict[str, float]] = {}
    if costs is None or not bandwidth or not gemm_rate:
        return shares
    for summary in summaries:
        decode, first = summary.median("decode_tps"), summary.median("ttft_s")
        tokens = summary.median("prompt_tokens")
        if summary.workload == "W1" and decode:
            shares.setdefault(summary.peer, {})["W1 decode"] = decode / costs.decode_floor_tps(bandwidth)
        if summary.workload == "W5" and first and tokens:
            floor_s = costs.prefill_floor_s(int(tokens), gemm_rate)
            shares.setdefault(summary.peer, {})["W5 prefill"] = floor_s / first
    return shares


def shares_table(shares: dict[str, dict[str, float]], dtype: str) -> ReportTable:
    names = ("W1 decode", "W5 prefill")
    rows = [
        [peer, *(f"{100 * values[name]:.0f} %" if name in values else "-" for name in names)]
        for peer, values in shares.items()
    ]
    return ReportTable(f"Share of the {dtype} floor", ["peer", *names], rows)


def peers_table(peers: Sequence[PeerFacts]) -> ReportTable:
    rows = [
        [
            facts.name,
            facts.kind or "-",
            facts.model,
            "-" if facts.start_s is None else number(facts.start_s),
            "-" if facts.ready_rss is None else number(facts.ready_rss / _MIB),
        ]
        for facts in peers
    ]
    return ReportTable("Peers", ["peer", "kind", "model", "start s", "RSS when ready MiB"], rows)


def to_rich(table: ReportTable) -> Table:
    caption = "\n".join(table.notes) or None
    drawn = Table(title=table.title, caption=caption, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for place, heading in enumerate(table.headings):
        drawn.add_column(heading, justify="right" if place else "left")
    for row in table.rows:
        drawn.add_row(*row)
    return drawn


def to_markdown(table: ReportTable) -> str:
    rule = ["---", *["---:"] * (len(table.headings) - 1)]
    lines = [f"**{table.title}**", "", _line(table.headings), f"|{'|'.join(rule)}|", *map(_line, table.rows)]
    notes = [line for note in table.notes for line in ("", note)]
    return "\n".join([*lines, *notes, ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(text.replace('|', '/') for text in cells)} |"
