"""pitfalls: the article's section 5, each mistake provoked in a sandbox and caught by the check that production uses.

Owns: the order.
Does not: provoke (book_pitfalls, key_pitfalls, kv_pitfalls, process_pitfalls).
Invariants: nothing faulty outlives its experiment: each has its own engine.
"""

from __future__ import annotations

from cluster.lab.book_pitfalls import book_pitfalls
from cluster.lab.findings import Findings, LabContext, Table
from cluster.lab.joined_findings import joined
from cluster.lab.key_pitfalls import key_pitfalls
from cluster.lab.kv_pitfalls import kv_pitfalls
from cluster.lab.lab_engines import ModelEngines
from cluster.lab.pitfall import HEADER
from cluster.lab.process_pitfalls import process_pitfalls

POOL_TOKENS = 4096


def run(context: LabContext) -> Findings:
    context.progress("books", 0.0)
    parts = [book_pitfalls()]
    context.progress("keys", 0.1)
    parts.append(key_pitfalls(context.seed))
    context.progress("loading the model", 0.2)
    engines = ModelEngines(context, tokens=POOL_TOKENS)
    parts += [kv_pitfalls(context, engines), process_pitfalls(context, engines)]
    rows = sorted((row for part in parts for table in part.tables for row in table.rows), key=lambda row: row[0])
    whole = joined(
        "pitfalls",
        "mistakes, what they do, and what catches them",
        "Each mistake is made on purpose in an engine of its own, and the checks are those of production: the audit "
        "of an "
        "idle engine, assertions on the way, `--strict-blocks`, fingerprints, exact comparison of tokens.",
        parts,
    )
    table = Table("Pitfalls", HEADER, tuple(rows))
    figures = {
        **whole.figures,
        "pitfalls.provoked": len(rows),
        "pitfalls.caught": sum("NOT" not in row[3] for row in rows),
    }
    return Findings(
        whole.experiment, whole.title, whole.summary, whole.claims, (table,), whole.charts, figures, whole.text
    )
