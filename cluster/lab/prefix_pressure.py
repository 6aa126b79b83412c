"""Both mechanisms under memory pressure: a pool too small for all, with and without the prefix cache (5.6 and 6).

Owns: the two kinds of traffic, shared and unrelated, and the comparison of preemptions, peak blocks and work.
Does not: compute; only who holds and who computes what matters here.
Invariants: every request is answered in every run, with all its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from cluster.lab.driven_engine import RunRecord
from cluster.lab.findings import Chart, Claim, Findings, LabContext, Series, Table, Verdict
from cluster.lab.lab_engines import BLOCK_SIZE, counting_engine
from cluster.lab.prompt_sets import Tokens, TokenSource

NUM_BLOCKS = 260
REQUESTS = 20
FEW, ALL = 4, 64  # sequences that may run at a time
SHARED, OWN, ANSWER = 960, 64, 128


@dataclass(frozen=True, slots=True)
class Pressure:
    peak_blocks: int
    preemptions: int
    computed_tokens: int
    most_running: int
    steps: int
    in_use: tuple[int, ...]


def prompts(shared: bool, seed: int) -> list[Tokens]:
    """Requests of one length, with a common beginning or without."""
    source = TokenSource(seed, (100, 32_000))
    start = source.take(SHARED)
    return [(start if shared else source.take(SHARED)) + source.take(OWN) for _ in range(REQUESTS)]


def under_pressure(shared: bool, prefix_cache: str, seats: int, seed: int = 0) -> Pressure:
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    engine = counting_engine(NUM_BLOCKS, prefix_cache=prefix_cache, max_num_seqs=seats)
    requests = [
        GenerationRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling)
        for number, prompt in enumerate(prompts(shared, seed))
    ]
    record: RunRecord = engine.run(requests)
    assert all(len(choices[0]) == ANSWER for choices in record.choices.values()) and len(record.choices) == REQUESTS
    return Pressure(
        peak_blocks=max(record.in_use),
        preemptions=record.preemptions,
        computed_tokens=record.prefill_tokens,
        most_running=max(record.running),
        steps=record.steps,
        in_use=tuple(record.in_use),
    )


def run_pressure(context: LabContext) -> Findings:
    runs: dict[tuple[str, int, str], Pressure] = {}
    for kind in ("shared", "unrelated"):
        for seats in (FEW, ALL):
            for cache in ("off", "radix"):
                context.progress("prefix: memory pressure", len(runs) / 8)
                runs[kind, seats, cache] = under_pressure(kind == "shared", cache, seats, context.seed)
    figures: dict[str, float | int | str | bool] = {"pressure.pool_blocks": NUM_BLOCKS}
    for (kind, seats, cache), run in runs.items():
        name = f"pressure.{kind}.{'few' if seats == FEW else 'all'}.{cache}"
        figures |= {
            f"{name}.peak_blocks": run.peak_blocks,
            f"{name}.preemptions": run.preemptions,
            f"{name}.computed_tokens": run.computed_tokens,
            f"{name}.most_running": run.most_running,
            f"{name}.steps": run.steps,
        }
    table = Table(
        title=f"{REQUESTS} requests of {SHARED + OWN:,} + {ANSWER} tokens in {NUM_BLOCKS} blocks of {BLOCK_SIZE}",
        header=(
            "prompts",
            "may run",
            "prefix cache",
            "preemptions",
            "peak blocks",
            "most running",
            "prefilled",
            "steps",
        ),
        rows=tuple(
            (
                f"{SHARED} tokens shared" if kind == "shared" else "unrelated",
                str(seats),
                cache,
                str(run.preemptions),
                str(run.peak_blocks),
                str(run.most_running),
                f"{run.computed_tokens:,}",
                f"{run.steps:,}",
            )
            for (kind, seats, cache), run in runs.items()
        ),
        note="Prefilled tokens include what a preempted request computes again. Blocks that are only cached do not "
        "count as held, because they are evicted when room is needed.",
    )
    charts = tuple(
        Chart(
            name=f"prefix-pressure-{'few' if seats == FEW else 'all'}",
            title=f"Blocks held by requests that share {SHARED} tokens, at most {seats} running",
            x_label="engine step",
            y_label="blocks",
            series=tuple(
                Series(f"prefix cache {cache}", _floats(range(run.steps)), _floats(run.in_use))
                for (kind, most, cache), run in runs.items()
                if (kind, most) == ("shared", seats)
            ),
            kind="step",
        )
        for seats in (FEW, ALL)
    )
    return Findings("prefix", "pressure", "", (_claim(runs),), (table,), charts, figures)


def _claim(runs: dict[tuple[str, int, str], Pressure]) -> Claim:
    few_off, few_on = runs["shared", FEW, "off"], runs["shared", FEW, "radix"]
    off, on = runs["shared", ALL, "off"], runs["shared", ALL, "radix"]
    alone_off, alone_on = runs["unrelated", ALL, "off"], runs["unrelated", ALL, "radix"]
    saves = few_on.peak_blocks < few_off.peak_blocks and on.computed_tokens < off.computed_tokens
    harmless = alone_on.preemptions <= alone_off.preemptions and alone_on.computed_tokens <= alone_off.computed_tokens
    free = few_on.preemptions <= few_off.preemptions and on.preemptions <= off.preemptions
    return Claim(
        "5.6, 6",
        "Paging and prefix cache improve memory and compute together; nothing is traded",
        "fewer blocks, fewer tokens computed, no more preemptions",
        f"shared prompts, {FEW} running: peak {few_off.peak_blocks} to {few_on.peak_blocks} blocks and "
        f"{few_off.preemptions} to {few_on.preemptions} preemptions; as many running as fit: {off.most_running} to "
        f"{on.most_running} at a time, {off.computed_tokens:,} to {on.computed_tokens:,} tokens prefilled, "
        f"{off.steps:,} to {on.steps:,} steps, but {off.preemptions} to {on.preemptions} preemptions, because more are "
        f"let in; unrelated prompts: {alone_off.preemptions} to {alone_on.preemptions} preemptions, "
        f"{alone_off.computed_tokens:,} to {alone_on.computed_tokens:,} tokens",
        Verdict.NOT_CONFIRMED if not (saves and harmless) else Verdict.CONFIRMED if free else Verdict.DEPENDS,
    )


def _floats(values: Iterable[int]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
