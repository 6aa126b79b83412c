"""Which way of keying finds how much of which traffic: counted by the engine and by the lab, without a model.

Owns: the matrix of workloads and keyings, what token-exact reuse adds, and the claims of 3.2 and 3.4 about them.
Does not: time anything (prefix_times).
Invariants: the engine's hits equal the lab's own count in every cell, else the experiment fails.
"""

from __future__ import annotations

from cluster.lab.findings import Chart, Claim, Findings, LabContext, Series, Table, Verdict
from cluster.lab.lab_engines import BLOCK_SIZE, counting_engine
from cluster.lab.prefix_counts import LongestPrefixCount
from cluster.lab.prefix_keyings import KEYINGS, Keying, Reuse, run_set
from cluster.lab.prompt_sets import TokenSource, prompt_sets

NUM_BLOCKS = 8192  # nothing is evicted
LONGEST, SHORT_LONGEST = 3200, 640  # of the prompts, in tokens
VOCABULARY = (100, 32_000)
WHOLE_BLOCKS = Keying(
    name="blocks",
    label="radix, whole blocks only",
    count=lambda: LongestPrefixCount(BLOCK_SIZE),
    options={"partial_reuse": False},
)


def run_matrix(context: LabContext) -> Findings:
    longest = SHORT_LONGEST if context.short else LONGEST
    sets = prompt_sets(TokenSource(context.seed, VOCABULARY), longest)
    keyings = (*KEYINGS, WHOLE_BLOCKS)
    cells: dict[str, dict[str, Reuse]] = {}
    for number, prompts in enumerate(sets):
        context.progress("prefix: counts", number / len(sets))
        cells[prompts.name] = {
            keying.name: run_set(prompts, keying, counting_engine(NUM_BLOCKS, **keying.options)) for keying in keyings
        }
    for name, row in cells.items():
        for keying_name, reuse in row.items():
            assert reuse.hits == reuse.counted_hits, f"{name}, {keying_name}: {reuse}"
    figures: dict[str, float | int | str | bool] = {"counts.engine_equals_lab": True}
    for name, row in cells.items():
        figures[f"{name}.prompt_tokens"] = row["off"].prompt_tokens
        for keying_name, reuse in row.items():
            figures[f"{name}.{keying_name}.computed_tokens"] = reuse.computed
            figures[f"{name}.{keying_name}.hit_share"] = round(reuse.share, 4)
    return Findings(
        experiment="prefix",
        title="What is found",
        summary="",
        claims=_claims(cells, keyings),
        tables=(_table(cells, keyings, {prompts.name: prompts.num_requests for prompts in sets}),),
        charts=(_chart(cells),),
        figures=figures,
    )


def _claims(cells: dict[str, dict[str, Reuse]], keyings: tuple[Keying, ...]) -> tuple[Claim, ...]:
    chat, agent, rag, shuffled = (cells[name] for name in ("chat", "agent", "rag", "rag-reordered"))
    edit, unique = cells["coding-edit"], cells["unique"]
    checked = len(cells) * len(keyings)
    chunked = [row[name].hits > row["whole"].hits for row in (chat, agent) for name in ("chunk64", "chunk128")]
    return (
        Claim(
            "3.2",
            "A hash over the whole request never hits in a chat",
            "0 tokens found",
            f"{chat['whole'].hits} of {chat['whole'].prompt_tokens:,} tokens found; the radix tree finds "
            f"{chat['radix'].share:.0%} of the same turns",
            Verdict.CONFIRMED if chat["whole"].hits == 0 < chat["radix"].hits else Verdict.NOT_CONFIRMED,
        ),
        Claim(
            "3.2",
            "Chunks of 64 or 128 tokens find shared beginnings that a whole-request hash misses",
            "high hit share for agents and chats",
            f"agent {agent['chunk64'].share:.0%} and {agent['chunk128'].share:.0%} (whole request "
            f"{agent['whole'].share:.0%}), chat {chat['chunk64'].share:.0%} and {chat['chunk128'].share:.0%}",
            Verdict.CONFIRMED if all(chunked) else Verdict.DEPENDS if any(chunked) else Verdict.NOT_CONFIRMED,
        ),
        Claim(
            "3.4",
            "RAG over the same documents hits",
            "the documents are computed once",
            f"{rag['radix'].share:.0%} found in the same order, but {shuffled['radix'].share:.0%} when the same "
            "documents come in another order",
            Verdict.DEPENDS if shuffled["radix"].share < rag["radix"].share else Verdict.CONFIRMED,
        ),
        Claim(
            "3.1",
            "A coding assistant reuses the context of a file",
            "the file is computed once",
            f"{cells['coding']['radix'].share:.0%} found while the file stays as it is, {edit['radix'].share:.0%} when "
            "a token enters its middle between requests: all behind the edit is computed again",
            Verdict.DEPENDS if edit["radix"].share < cells["coding"]["radix"].share else Verdict.CONFIRMED,
        ),
        Claim(
            "3.4",
            "The gain depends on the share of common prefix",
            "nothing shared, nothing found",
            f"{unique['radix'].hits} of {unique['radix'].prompt_tokens:,} tokens found in unrelated prompts, "
            f"{agent['radix'].share:.0%} in the agent's",
            Verdict.CONFIRMED if unique["radix"].hits == 0 < agent["radix"].hits else Verdict.NOT_CONFIRMED,
        ),
        Claim(
            "4.3",
            "First share whole blocks only, read-only; copy-on-write comes later",
            "the first stage has most of the gain",
            f"chat {chat['blocks'].share:.0%} with whole blocks of {BLOCK_SIZE}, {chat['radix'].share:.0%} when the "
            f"block at the border is copied; agent {agent['blocks'].share:.0%} and {agent['radix'].share:.0%}",
            Verdict.CONFIRMED if 2 * chat["blocks"].hits > chat["radix"].hits else Verdict.DEPENDS,
        ),
        Claim(
            "3.4",
            "Read the hit rate in the log before deciding between hash and radix",
            "the engine's own count can be trusted",
            f"in all {checked} pairs of workload and keying the engine's hits equal the lab's own count to the token; "
            f"radix against chunks of 64: chat {chat['radix'].share:.0%} / {chat['chunk64'].share:.0%}, agent "
            f"{agent['radix'].share:.0%} / {agent['chunk64'].share:.0%}",
            Verdict.CONFIRMED,
        ),
    )


def _table(cells: dict[str, dict[str, Reuse]], keyings: tuple[Keying, ...], requests: dict[str, int]) -> Table:
    return Table(
        title="Prompt tokens computed, and the share found in the cache",
        header=("workload", "requests", "prompt tokens", *(keying.label for keying in keyings)),
        rows=tuple(
            (
                name,
                str(requests[name]),
                f"{row['off'].prompt_tokens:,}",
                *(f"{row[keying.name].computed:,} ({row[keying.name].share:.0%})" for keying in keyings),
            )
            for name, row in cells.items()
        ),
        note="Requests come one after the other and nothing is evicted. The engine's hits equal the lab's own count in "
        "every cell.",
    )


def _chart(cells: dict[str, dict[str, Reuse]]) -> Chart:
    places = tuple(float(place) for place in range(len(cells)))
    return Chart(
        name="prefix-hit-share",
        title="Share of prompt tokens found, by keying",
        x_label="workload",
        y_label="share of prompt tokens",
        series=tuple(
            Series(keying.label, places, tuple(row[keying.name].share for row in cells.values()))
            for keying in KEYINGS
            if keying.name != "off"
        ),
        kind="bar",
        x_ticks=tuple(cells),
    )
