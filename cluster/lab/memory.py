"""memory: the same requests with reserved, growing and paged KV memory: bytes, waste, requests at once, tokens/s.

Owns: the scale of the runs, and what they say about the article's sections 1.3, 2.5 and 4.4.
Does not: count (memory_counts), time (memory_speed) or draw (memory_charts).
Invariants: bytes are tokens times the bytes per token that the loaded model's pool has, checked against its tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.byte_size import format_bytes
from cluster.lab.findings import Findings, LabContext, Table
from cluster.lab.lab_engines import ModelEngines
from cluster.lab.memory_charts import memory_charts
from cluster.lab.memory_claims import MemoryRun, memory_claims
from cluster.lab.memory_counts import (
    BLOCK_SIZE,
    GROW_ONE,
    MAX_MODEL_LEN,
    MODEL_LENGTHS,
    PAGED,
    RESERVE_MAX,
    RESERVE_OWN,
    count_memory,
)
from cluster.lab.memory_speed import SpeedRun, measure_speed
from cluster.lab.mixed_requests import mixed_requests


@dataclass(frozen=True, slots=True)
class _Scale:
    few: int
    many: int
    timed: int
    budget: int  # tokens


_FULL = _Scale(few=60, many=200, timed=24, budget=2048)
_SHORT = _Scale(few=12, many=24, timed=5, budget=1024)


def run(context: LabContext) -> Findings:
    scale = _SHORT if context.short else _FULL
    context.progress("counting", 0.0)
    many = mixed_requests(scale.many, context.seed)
    counts = count_memory(many[: scale.few], many, scale.budget)
    context.progress("loading the model", 0.1)
    engines = ModelEngines(context, tokens=2 * scale.budget)
    finished: list[str] = []

    def done(name: str) -> None:
        finished.append(name)
        context.progress(f"timed: {name}", 0.2 + 0.2 * len(finished))

    speed = measure_speed(engines, many[: scale.timed], scale.budget, context.seed, done)
    measured = MemoryRun(
        counts=counts,
        speed=speed,
        budget=scale.budget,
        bytes_per_token=engines.facts.kv_bytes_per_token,
        tensor_bytes=engines.pool_bytes,
        account_bytes=engines.facts.num_blocks * BLOCK_SIZE * engines.facts.kv_bytes_per_token,
    )
    return Findings(
        experiment="memory",
        title="the same requests, four ways to give them KV memory",
        summary=_summary(measured, scale),
        claims=memory_claims(measured),
        tables=(_unlimited(measured), _budget(measured), _speed(measured), _lengths(measured)),
        charts=memory_charts(measured),
        figures=_figures(measured),
    )


def _summary(run: MemoryRun, scale: _Scale) -> str:
    requests = mixed_requests(scale.many, 0)
    longest = max(request.total for request in requests)
    return (
        f"{scale.many} requests with prompts of 24 to 200 tokens that ask for 64 to 160 more and end earlier (the "
        "longest "
        f"holds {longest} tokens), a model that allows {MAX_MODEL_LEN}. Counted first, then {scale.timed} of them run "
        f"on the model, whose KV takes {run.bytes_per_token:,} bytes a token. Nothing is cached here: what is saved is "
        "saved by blocks alone."
    )


def _unlimited(run: MemoryRun) -> Table:
    rows = []
    for name, record in run.counts.unlimited.items():
        copied = format_bytes(record.copied * run.bytes_per_token) if record.copied else "0"
        waste = f"{record.inner_waste:.1%}"
        rows.append((name, run.mib(record.peak), run.mib(record.peak_used), waste, copied))
    return Table(
        "No limit: every request runs when it arrives",
        ("policy", "peak MiB", "of it used", "allocated and empty", "bytes copied"),
        tuple(rows),
        "Peak counts both tensors while one is copied into the other; empty is over all steps.",
    )


def _budget(run: MemoryRun) -> Table:
    rows = [
        (
            name,
            f"{record.mean_running:.1f}",
            str(record.peak_running),
            f"{record.inner_waste:.1%}",
            f"{record.steps_with_holes} of {record.steps}",
            f"{record.mean_unusable / run.budget:.1%}" if record.steps_with_holes else "-",
            str(record.preemptions),
            str(record.steps),
        )
        for name, record in run.counts.budget.items()
    ]
    header = (
        "policy",
        "at once, mean",
        "most",
        "allocated and empty",
        "steps with holes",
        "in holes",
        "preempted",
        "steps",
    )
    return Table(
        f"{run.mib(run.budget)} MiB ({run.budget} tokens) for all: what fits",
        header,
        tuple(rows),
        "Steps with holes: the first in the queue waited although enough was free, in pieces; in holes: how much, of "
        "the "
        "budget, in those steps.",
    )


def _speed(run: MemoryRun) -> Table:
    rows = [(name, *_speed_row(one)) for name, one in run.speed.items()]
    header = ("policy", "tokens/s", "at once, mean", "engine s", "copies s", "bytes copied", "preempted")
    return Table(f"The same {run.mib(run.budget)} MiB on the model", header, tuple(rows))


def _speed_row(one: SpeedRun) -> tuple[str, ...]:
    return (
        f"{one.tokens_per_s:.1f}",
        f"{one.mean_running:.1f}",
        f"{one.engine_s:.1f}",
        f"{one.copy_s:.2f}" if one.copied_bytes else "-",
        format_bytes(one.copied_bytes) if one.copied_bytes else "0",
        str(one.preemptions),
    )


def _lengths(run: MemoryRun) -> Table:
    rows = [
        (str(length), run.mib(run.counts.by_length[length]), f"{run.counts.saving_at(length):.1%}")
        for length in MODEL_LENGTHS
    ]
    note = f"Paging needs {run.mib(run.counts.unlimited[PAGED].peak)} MiB whatever the model allows."
    return Table(
        "Saved by paging, by what the model allows", ("max_model_len", "reserved MiB", "saved"), tuple(rows), note
    )


def _figures(run: MemoryRun) -> dict[str, float | int | str | bool]:
    names = {RESERVE_MAX: "reserve_max", RESERVE_OWN: "reserve_own", GROW_ONE: "grow", PAGED: "paged"}
    figures: dict[str, float | int | str | bool] = {
        "memory.bytes_per_token": run.bytes_per_token,
        "memory.budget_tokens": run.budget,
        "memory.budget_mib": run.in_mib(run.budget),
        "memory.tensor_bytes": run.tensor_bytes,
        "memory.account_bytes": run.account_bytes,
        "memory.smallest_pool_blocks": run.counts.smallest_pool,
        "memory.smallest_pool_mib": run.in_mib(run.counts.smallest_pool * BLOCK_SIZE),
        "memory.saving": round(run.counts.saving, 4),
        "memory.saving_least": round(run.counts.saving_at(MODEL_LENGTHS[0]), 4),
        "memory.saving_most": round(run.counts.saving_at(MODEL_LENGTHS[-1]), 4),
    }
    for name, key in names.items():
        free, within, speed = run.counts.unlimited[name], run.counts.budget[name], run.speed[name]
        figures |= {
            f"memory.{key}.peak_mib": run.in_mib(free.peak),
            f"memory.{key}.used_mib": run.in_mib(free.peak_used),
            f"memory.{key}.inner_waste": round(free.inner_waste, 4),
            f"memory.{key}.mean_running": round(within.mean_running, 2),
            f"memory.{key}.steps": within.steps,
            f"memory.{key}.steps_with_holes": within.steps_with_holes,
            f"memory.{key}.in_holes": round(within.mean_unusable / run.budget, 4),
            f"memory.{key}.preemptions": within.preemptions,
            f"memory.{key}.tokens_per_s": round(speed.tokens_per_s, 2),
        }
    grow = run.speed[GROW_ONE]
    return figures | {
        "memory.grow.copy_s": round(grow.copy_s, 3),
        "memory.grow.engine_s": round(grow.engine_s, 3),
        "memory.grow.copied_bytes": grow.copied_bytes,
        "memory.grow.copied_mib": round(grow.copied_bytes / 2**20, 1),
    }
