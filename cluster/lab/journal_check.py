"""The journal experiment: two runs of the same code leave one journal; a changed line shows where (4.5 and 5.6).

Owns: the runs, of bare books and of a whole engine, the changes to be found, and the claims.
Does not: record or compare (cluster.lab.journal, worker.kvcache.block_journal).
Invariants: nothing is computed and no clock is read, so the figures are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from cluster.config import CacheConfig
from cluster.core.hashing import RouteScheme
from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from cluster.lab.changed_managers import HeadFirstManager, LeakyManager
from cluster.lab.findings import Chart, Claim, Findings, LabContext, Series, Table, Verdict
from cluster.lab.journal import record
from cluster.lab.lab_engines import counting_engine
from cluster.lab.prompt_sets import TokenSource
from worker.engine_assembly import build_manager
from worker.kvcache.block_journal import BlockAction, BlockEntry, BlockJournal, Difference, diff
from worker.kvcache.block_manager import BlockManager
from worker.runner import ModelFacts

NUM_BLOCKS = 64
REQUESTS = 16


class Comparison(NamedTuple):
    what: str
    entries: int
    difference: Difference | None


def run(context: LabContext) -> Findings:
    seed = context.seed
    ours = record(seed=seed)
    leaky = record(seed=seed, manager_class=LeakyManager, check=False)
    engine = engine_journal(seed)
    comparisons = {
        "same": Comparison("nothing changed, books alone", len(ours), diff(ours, record(seed=seed))),
        "engine_same": Comparison("nothing changed, a whole engine", len(engine), diff(engine, engine_journal(seed))),
        "engine_order": Comparison(
            "the requests of the engine in another order", len(engine), diff(engine, engine_journal(seed, turned=True))
        ),
        "partial_off": Comparison(
            "partial reuse switched off", len(ours), diff(ours, record(seed=seed, partial_reuse=False))
        ),
        "head_first": Comparison(
            "blocks let go from the head",
            len(ours),
            diff(ours, record(seed=seed, manager_class=HeadFirstManager, check=False)),
        ),
        "leak": Comparison("one reference not let go", len(ours), diff(ours, leaky)),
    }
    found = comparisons["leak"].difference
    caught = first_broken_invariant(seed)
    figures: dict[str, float | int | str | bool] = {}
    for name, one in comparisons.items():
        figures[f"{name}.entries"] = one.entries
        figures[f"{name}.equal"] = one.difference is None
        if one.difference is not None:
            figures[f"{name}.agreed_entries"] = one.difference.agreed
    figures["leak.caught_by_invariants"] = caught
    figures["workload.has_every_action"] = {entry.action for entry in ours} == set(BlockAction)
    return Findings(
        experiment="journal",
        title="Two runs, compared block by block",
        summary=(
            f"Two runs of the same code leave the same {len(ours)} entries, and a whole engine the same {len(engine)}. "
            f"Each of {len(comparisons) - 2} changes shows at the first block that it moves."
        ),
        claims=_claims(comparisons, caught),
        tables=(_table(comparisons),),
        charts=(_chart(ours, leaky),),
        figures=figures,
        text=f"one reference not let go: {found}",
    )


def engine_journal(seed: int, *, turned: bool = False) -> list[BlockEntry]:
    """More requests than fit, some of them with two answers. `turned`: the last one comes first."""
    source, entries = TokenSource(seed, (100, 32_000)), list[BlockEntry]()
    start = source.take(100)
    requests = [
        GenerationRequest(
            request_id=f"r{number}",
            prompt_token_ids=(start if number % 2 else source.take(60)) + source.take(30 + number),
            sampling=SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, n=1 + number % 3 // 2),
        )
        for number in range(REQUESTS)
    ]
    counting_engine(NUM_BLOCKS, partial(_recorded, entries)).run(requests[::-1] if turned else requests)
    return entries


def first_broken_invariant(seed: int) -> str:
    """What the check that runs in production says of the lost reference; "" if it says nothing."""
    try:
        record(seed=seed, manager_class=LeakyManager)
    except AssertionError as error:
        return str(error)
    return ""


def _recorded(entries: list[BlockEntry], config: CacheConfig, facts: ModelFacts, scheme: RouteScheme) -> BlockManager:
    return build_manager(config, facts, scheme, BlockJournal(entries.append))


def _claims(comparisons: dict[str, Comparison], caught: str) -> tuple[Claim, ...]:
    same, engine, leak = (comparisons[name] for name in ("same", "engine_same", "leak"))
    changed = [one for name, one in comparisons.items() if name not in ("same", "engine_same")]
    entry = leak.difference.b if leak.difference is not None else None
    step = "none" if entry is None else str(entry.step)
    return (
        Claim(
            "5.6",
            "Keep the logs of runs, and compare the block sequence after a change",
            "equal for equal code, different where a change acts",
            f"two runs agree in all {same.entries} entries, two engines in all {engine.entries}; of {len(changed)} "
            f"changes {sum(one.difference is not None for one in changed)} are seen. The order of arrival counts "
            "too, so it must be the same",
            Verdict.CONFIRMED
            if same.difference is engine.difference is None and all(one.difference is not None for one in changed)
            else Verdict.NOT_CONFIRMED,
        ),
        Claim(
            "4.5",
            "One log line with sequence, block, ref count and free blocks finds what was not let go",
            "the line where the ref count is one too high",
            f"first differing entry in step {step}: {entry or 'none'}; the check of the books says: "
            f"{caught or 'nothing'}",
            Verdict.CONFIRMED if leak.difference is not None and caught else Verdict.NOT_CONFIRMED,
        ),
    )


def _table(comparisons: dict[str, Comparison]) -> Table:
    return Table(
        title="What is compared, and where two journals part",
        header=("change", "entries", "equal up to entry", "first difference, before", "first difference, after"),
        rows=tuple(_row(one) for one in comparisons.values()),
    )


def _row(one: Comparison) -> tuple[str, ...]:
    if one.difference is None:
        return one.what, str(one.entries), "all", "", ""
    a, b = one.difference.a, one.difference.b
    return one.what, str(one.entries), str(one.difference.agreed), str(a or "(ended)"), str(b or "(ended)")


def _chart(ours: Sequence[BlockEntry], leaky: Sequence[BlockEntry]) -> Chart:
    return Chart(
        name="journal-free-blocks",
        title="Free blocks after every entry",
        x_label="entry",
        y_label="free blocks",
        series=tuple(
            Series(label, tuple(float(place) for place in range(len(entries))), tuple(float(e.free) for e in entries))
            for label, entries in (("as it is", ours), ("one reference not let go", leaky))
        ),
        kind="step",
        note="Cached blocks that nobody holds are not free: they are evicted when room is needed.",
    )
