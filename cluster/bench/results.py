"""Results: everything a session found, and its files.

Owns: the tables in order, and the JSON, Markdown and picture files.
Does not: print (bench_command), or choose figures (report).
Invariants: the JSON has every record, dropped and failed ones too; a file that cannot be written is a ConfigError.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.bench.machine import MachineNote
from cluster.bench.machine_probe import MachineProbe
from cluster.bench.peer import PeerFacts
from cluster.bench.plot import draw
from cluster.bench.report import (
    ReportTable,
    limits_table,
    peers_table,
    shares_of_floor,
    shares_table,
    to_markdown,
    workload_tables,
)
from cluster.bench.run_record import RunRecord
from cluster.bench.summary import Summary, summarise
from cluster.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    note: MachineNote
    peers: Sequence[PeerFacts]
    records: Sequence[RunRecord]
    probe: MachineProbe
    interrupted: str = ""

    @property
    def summaries(self) -> list[Summary]:
        return summarise(self.records)

    def tables(self) -> list[ReportTable]:
        summaries = self.summaries
        tables = [*workload_tables(summaries, self.records), peers_table(self.peers), limits_table(self.probe)]
        shares = shares_of_floor(summaries, self.probe)
        if shares and self.probe.costs is not None:
            tables.append(shares_table(shares, self.probe.costs.dtype))
        return tables

    def to_wire(self) -> dict[str, Any]:
        return {
            **asdict(self.note),
            "interrupted": self.interrupted,
            "peers": [asdict(facts) for facts in self.peers],
            "limits": [asdict(reading) for reading in self.probe.readings],
            "limits_missing": self.probe.missing,
            "costs": None if self.probe.costs is None else asdict(self.probe.costs),
            "shares_of_floor": shares_of_floor(self.summaries, self.probe),
            "summary": [summary.to_wire() for summary in self.summaries],
            "records": [record.to_wire() for record in self.records],
        }

    def to_markdown(self) -> str:
        interrupted = [f"\n{self.interrupted}.\n"] if self.interrupted else []
        return "\n".join([f"{self.note.text()}\n", *interrupted, *map(to_markdown, self.tables())])

    def write(self, *, json_file: Path | None, markdown: Path | None, png: Path | None) -> None:
        try:
            if json_file is not None:
                json_file.write_text(json.dumps(self.to_wire(), indent=1) + "\n")
            if markdown is not None:
                markdown.write_text(self.to_markdown())
            if png is not None:
                draw(self.summaries, png)
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from None
