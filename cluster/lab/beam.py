"""The beam experiment: what forks share, and what copy-on-write costs (article 2.3).

Owns: the fork of the article's example and of other sizes, and searches of width 2 to 16 with and without sharing.
Does not: search (worker.beam_search) or keep books (BlockManager; EagerForks where nothing is shared).
Invariants: both ways of a search give the same texts and scores, else the experiment fails; tables are read from the
production classes.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from rich.console import Console

from cluster.config import CacheConfig
from cluster.core.hashing import RouteScheme
from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from cluster.lab.block_picture import draw
from cluster.lab.eager_forks import EagerForks
from cluster.lab.findings import Chart, Claim, Findings, LabContext, Series, Table, Verdict
from cluster.lab.fork_saving import ForkSaving, fork_saving, fork_scenes
from cluster.lab.lab_engines import BLOCK_SIZE, ModelEngines
from cluster.lab.prefix_times import token_source
from cluster.lab.prompt_sets import Tokens
from worker.kvcache.block_journal import BlockAction, BlockEntry, BlockJournal
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.runner import ModelFacts

CASES = ((30, 50, 1), (30, 50, 2), (30, 50, 16), (32, 50, 16), (200, 220, 16), (1000, 1050, 16))  # prefix, total, block
WIDTHS = (2, 4, 8, 16)


class Search(NamedTuple):
    """peak_blocks: held after a step, at most.  copies: of blocks, over the whole search."""

    peak_blocks: int
    copies: int
    copied_bytes: int
    seconds: float
    texts: dict[int, list[int]]


def run(context: LabContext) -> Findings:
    savings = {case: fork_saving(*case) for case in CASES}
    context.progress("beam: loading the model", 0.0)
    engines = ModelEngines(context, tokens=4096)
    widths = WIDTHS[:2] if context.short else WIDTHS
    length, answer = min(200, engines.facts.max_model_len // 2), 4 if context.short else 24
    prompt = token_source(engines, context.seed).take(length)
    searches: dict[int, tuple[Search, Search]] = {}
    for number, width in enumerate(widths):
        context.progress("beam: searches", number / len(widths))
        ways = (BlockManager, EagerForks)
        shared, apart = (_search(engines, prompt, width, answer, way) for way in ways)
        assert shared.texts == apart.texts, f"sharing changed the answer of width {width}"
        searches[width] = shared, apart
    return Findings(
        experiment="beam",
        title="Beam search: shared beginnings and copy-on-write",
        summary=_summary(savings, searches),
        claims=(_fork_claim(savings), _search_claim(searches)),
        tables=(_fork_table(savings), _search_table(searches, length, answer)),
        charts=(_chart(searches),),
        figures=_figures(savings, searches),
        text=_drawn(),
    )


def _search(engines: ModelEngines, prompt: Tokens, width: int, answer: int, way: type[BlockManager]) -> Search:
    entries: list[BlockEntry] = []
    engine = engines.engine(partial(_manager, way, entries), prefix_cache="off")
    sampling = SamplingParams(beam_width=width, max_tokens=answer, ignore_eos=True)
    record = engine.run([GenerationRequest(request_id="beam", prompt_token_ids=prompt, sampling=sampling)])
    copies = sum(entry.action is BlockAction.COPY for entry in entries)
    facts = engines.facts
    return Search(
        peak_blocks=max(record.in_use),
        copies=copies,
        copied_bytes=copies * facts.block_size * facts.kv_bytes_per_token,
        seconds=record.seconds,
        texts=record.choices["beam"],
    )


def _manager(
    way: type[BlockManager], entries: list[BlockEntry], _config: CacheConfig, facts: ModelFacts, scheme: RouteScheme
) -> BlockManager:
    pool, journal = BlockPool(facts.num_blocks), BlockJournal(entries.append)
    return way(pool, None, facts.block_size, scheme, facts.kv_fingerprint, journal=journal)


def _summary(savings: dict[tuple[int, int, int], ForkSaving], searches: dict[int, tuple[Search, Search]]) -> str:
    example, width = savings[30, 50, 16], max(searches)
    shared, apart = searches[width]
    return (
        f"The article's fork saves {example.saved:.0%} of the prefix blocks ({example.apart} to {example.shared}), not "
        f"half: the block at the border is copied. Half is the limit for long prefixes or small blocks. A search of "
        f"width {width} holds {shared.peak_blocks} blocks instead of {apart.peak_blocks} and copies {shared.copies} "
        f"blocks instead of {apart.copies}."
    )


def _fork_claim(savings: dict[tuple[int, int, int], ForkSaving]) -> Claim:
    example, one, long = savings[30, 50, 16], savings[30, 50, 1], savings[1000, 1050, 16]
    return Claim(
        "2.3",
        "A has 50 tokens, B forks at 30: both share the prefix, and its memory is halved",
        "half of the prefix's blocks",
        f"prefix blocks {example.apart} to {example.shared}, {example.saved:.0%} less: block 0 is shared, block 1 is "
        f"copied at B's first write, and A's {example.unseen} blocks behind token 30 are never B's; {one.saved:.0%} "
        f"with blocks of 1, {long.saved:.1%} with a prefix of 1,000 tokens",
        Verdict.CONFIRMED if example.saved >= 0.49 else Verdict.DEPENDS if long.saved > 0.45 else Verdict.NOT_CONFIRMED,
    )


def _search_claim(searches: dict[int, tuple[Search, Search]]) -> Claim:
    width = max(searches)
    shared, apart = searches[width]
    fewer = all(s.peak_blocks < a.peak_blocks and s.copies < a.copies for s, a in searches.values())
    return Claim(
        "2.3",
        "Beams share their prefix, and a block is copied only at a write",
        "fewer blocks and copies than with a prefix for every beam, the same texts",
        f"width {width}: at most {shared.peak_blocks} blocks held instead of {apart.peak_blocks}, {shared.copies} "
        f"blocks copied instead of {apart.copies}; the texts are equal at every width",
        Verdict.CONFIRMED if fewer else Verdict.NOT_CONFIRMED,
    )


def _fork_table(savings: dict[tuple[int, int, int], ForkSaving]) -> Table:
    return Table(
        title="What a fork saves of the blocks that hold the common prefix",
        header=("prefix", "tokens of A", "block size", "apart", "shared", "saved", "copied at B's first write"),
        rows=tuple(
            (str(p), str(total), str(size), str(one.apart), str(one.shared), f"{one.saved:.1%}", str(one.copies))
            for (p, total, size), one in savings.items()
        ),
    )


def _search_table(searches: dict[int, tuple[Search, Search]], length: int, answer: int) -> Table:
    return Table(
        title=f"Searches behind a prompt of {length} tokens, {answer} tokens long, blocks of {BLOCK_SIZE}",
        header=("width", "peak blocks, shared", "apart", "copies, shared", "apart", "seconds, shared", "apart"),
        rows=tuple(
            (
                str(width),
                str(shared.peak_blocks),
                str(apart.peak_blocks),
                str(shared.copies),
                f"{apart.copies} ({apart.copied_bytes / 2**20:.0f} MiB)",
                f"{shared.seconds:.2f}",
                f"{apart.seconds:.2f}",
            )
            for width, (shared, apart) in searches.items()
        ),
        note="Apart: every fork copies all blocks of its parent. Both ways give the same texts.",
    )


def _chart(searches: dict[int, tuple[Search, Search]]) -> Chart:
    places = tuple(float(place) for place in range(len(searches)))
    return Chart(
        name="beam-peak-blocks",
        title="Most blocks held by one search",
        x_label="width",
        y_label="blocks",
        series=(
            Series("shared, copy-on-write", places, tuple(float(s.peak_blocks) for s, _ in searches.values())),
            Series("a copy for every beam", places, tuple(float(a.peak_blocks) for _, a in searches.values())),
        ),
        kind="bar",
        x_ticks=tuple(str(width) for width in searches),
    )


def _figures(
    savings: dict[tuple[int, int, int], ForkSaving], searches: dict[int, tuple[Search, Search]]
) -> dict[str, float | int | str | bool]:
    figures: dict[str, float | int | str | bool] = {"search.same_texts": True}
    for (prefix, total, size), one in savings.items():
        name = f"fork.{prefix}_of_{total}.block{size}"
        figures |= {f"{name}.apart": one.apart, f"{name}.shared": one.shared, f"{name}.saved": round(one.saved, 4)}
    for width, (shared, apart) in searches.items():
        for way, search in (("shared", shared), ("apart", apart)):
            name = f"search.{width}.{way}"
            figures |= {
                f"{name}.peak_blocks": search.peak_blocks,
                f"{name}.copies": search.copies,
                f"{name}.copied_bytes": search.copied_bytes,
                f"{name}.seconds": round(search.seconds, 4),
            }
    return figures


def _drawn() -> str:
    console = Console(width=100, color_system=None, force_terminal=False)
    with console.capture() as capture:
        for number, scene in enumerate(fork_scenes(), start=1):
            draw(scene, number, console)
    return "\n".join(line.rstrip() for line in capture.get().strip().splitlines())
