"""The tables of `benchmarks/RESULTS.md` on routing, from what bench_routing wrote.

    python -m benchmarks.routing_report FILE.json...

Owns: which comparisons are shown, and how.
Does not: run anything.
Invariants: comparisons are made seed by seed (the same requests), then averaged; ± is the deviation over the seeds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paired_changes import told
from cluster.simulate.policy_lineup import BASELINE, LINEUP, OURS

Row = dict[str, Any]
Cell = dict[str, Row]  # one setting, by policy
Key = tuple[int, float, float]  # tokens of cache, load, lag


def cells_of(rows: Sequence[Row], trace: str) -> dict[Key, Cell]:
    found: dict[Key, Cell] = {}
    for row in rows:
        if row["trace"] == trace:
            found.setdefault((-row["kv_tokens"], row["load"], row["lag_s"]), {})[row["policy"]] = row
    return dict(sorted(found.items()))


def against(cell: Cell, other: str, what: str) -> str:
    """Ours over the other's, less one, over the seeds that both ran."""
    pairs = zip(cell[OURS]["by_seed"][what], cell[other]["by_seed"][what], strict=False)
    return told([ours / theirs - 1 for ours, theirs in pairs])


def best_other(cell: Cell, what: str) -> str:
    return min((name for name in cell if name != OURS), key=lambda name: float(cell[name][what]))


def heading(key: Key, cell: Cell) -> str:
    row = cell[OURS]
    return f"{-key[0] // 1000} k, {key[1]:.0%}, {key[2] * 1000:.0f} ms (speed {row['speed']:.2f})"


def comparison(cells: dict[Key, Cell]) -> list[str]:
    """One line per setting: ours against least uncached tokens, against the best other, and the bound."""
    lines = [
        "| setting | hit | mean | against least uncached | p90 | against least uncached | p99 | against least uncached "
        "| best other mean | ours against it | best other p99 | ours against it | bound | shed |",
        "|" + "---|" * 14,
    ]
    for key, cell in cells.items():
        ours = cell[OURS]
        mean, p99 = best_other(cell, "mean"), best_other(cell, "p99")
        lines.append(
            f"| {heading(key, cell)} | {ours['hit']:.1%} | {ours['mean']:.3f} | {against(cell, BASELINE, 'mean')} "
            f"| {ours['p90']:.3f} | {against(cell, BASELINE, 'p90')} | {ours['p99']:.2f} "
            f"| {against(cell, BASELINE, 'p99')} | {mean} {cell[mean]['mean']:.3f} | {against(cell, mean, 'mean')} "
            f"| {p99} {cell[p99]['p99']:.2f} | {against(cell, p99, 'p99')} | {ours['bound']:.3f} | {ours['shed']} |"
        )
    return lines


def everybody(cells: dict[Key, Cell]) -> list[str]:
    """Hit rate and mean / p90 / p99 of every policy in every setting."""
    names = [entry.name for entry in LINEUP if any(entry.name in cell for cell in cells.values())]
    return [
        "| policy | " + " | ".join(heading(key, cell) for key, cell in cells.items()) + " |",
        "|" + "---|" * (len(cells) + 1),
        *(f"| {name} | " + " | ".join(brief(cell.get(name)) for cell in cells.values()) + " |" for name in names),
    ]


def brief(row: Row | None) -> str:
    if row is None:
        return ""
    noise = "" if row["noise"] is None else f" ± {row['noise']:.3f}"
    shed = f", {row['shed']} shed" if row["shed"] else ""
    return f"{row['hit']:.1%}: {row['mean']:.3f}{noise} / {row['p90']:.3f} / {row['p99']:.2f}{shed}"


def main(files: Sequence[str]) -> int:
    rows = [row for file in files for row in json.loads(Path(file).read_text())]
    for trace in dict.fromkeys(row["trace"] for row in rows):
        cells = cells_of(rows, trace)
        print(f"### {trace} trace\n\n" + "\n".join(comparison(cells)) + "\n\n" + "\n".join(everybody(cells)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
