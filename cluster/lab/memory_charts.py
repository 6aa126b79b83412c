"""The memory experiment's charts: allocated over time, requests at once, peaks, tokens per second.

Owns: which curves.
Does not: draw (charts).
Invariants: a step of growing memory has two points, the most that existed within it and what was left after it.
"""

from __future__ import annotations

from itertools import chain

from cluster.lab.findings import Chart, Series
from cluster.lab.memory_claims import MemoryRun
from cluster.lab.memory_counts import BLOCK_SIZE, GROW_DOUBLE, GROW_ONE, PAGED, RESERVE_MAX, RESERVE_OWN
from cluster.lab.memory_drive import DriveRecord


def memory_charts(run: MemoryRun) -> tuple[Chart, ...]:
    return (_allocated(run), _alone(run), _at_once(run), _peaks(run), _speed(run))


def _allocated(run: MemoryRun) -> Chart:
    unlimited = run.counts.unlimited
    paged = unlimited[PAGED]
    steps = tuple(float(step) for step in range(paged.steps))
    pool = run.in_mib(run.counts.smallest_pool * BLOCK_SIZE)
    used = tuple(run.in_mib(sample.used) for sample in paged.samples)
    curves = (
        *(_curve(run, name, unlimited[name]) for name in (RESERVE_MAX, RESERVE_OWN, GROW_DOUBLE, PAGED)),
        Series("paged: the pool itself", steps, (pool,) * len(steps)),
        Series("tokens held", steps, used),
    )
    return Chart(
        "allocated",
        "KV memory over time, the same requests",
        "step",
        "MiB",
        curves,
        kind="step",
        note="nvidia-smi would show the flat line of the pool, not the blocks in use: the pool is allocated once.",
    )


def _alone(run: MemoryRun) -> Chart:
    curves = tuple(_curve(run, name, run.counts.alone[name]) for name in (RESERVE_MAX, GROW_DOUBLE, PAGED))
    return Chart(
        "one-request",
        "KV memory of one long request",
        "tokens generated",
        "MiB",
        curves,
        kind="step",
        note="The saw-tooth comes from growing by copy, where the old and the new tensor exist at once; reserving is "
        "high "
        "and flat, blocks rise in small stairs.",
    )


def _curve(run: MemoryRun, name: str, record: DriveRecord) -> Series:
    points = chain.from_iterable(
        ((step, run.in_mib(sample.top)), (step + 0.5, run.in_mib(sample.allocated)))
        for step, sample in enumerate(record.samples)
    )
    x, y = zip(*points, strict=True)
    return Series("paged: blocks in use" if name == PAGED else name, x, y)


def _at_once(run: MemoryRun) -> Chart:
    curves = tuple(
        Series(name, tuple(float(s) for s in range(record.steps)), tuple(float(s.running) for s in record.samples))
        for name, record in run.counts.budget.items()
        if name != GROW_DOUBLE
    )
    title = f"Requests at once in {run.budget} tokens of KV memory"
    return Chart("at-once", title, "step", "requests", curves, kind="step")


def _peaks(run: MemoryRun) -> Chart:
    records = run.counts.unlimited
    places = tuple(float(place) for place in range(len(records)))
    curves = (
        Series("peak", places, tuple(run.in_mib(record.peak) for record in records.values())),
        Series("used at its peak", places, tuple(run.in_mib(record.peak_used) for record in records.values())),
    )
    ticks = tuple(name.replace(" ", "\n", 1) for name in records)
    return Chart("peaks", "Peak KV memory of the same requests", "", "MiB", curves, kind="bar", x_ticks=ticks)


def _speed(run: MemoryRun) -> Chart:
    names = (RESERVE_MAX, RESERVE_OWN, GROW_ONE, PAGED)
    values = tuple(run.speed[name].tokens_per_s for name in names)
    series = (Series("tokens/s", tuple(float(place) for place in range(len(names))), values),)
    ticks = tuple(name.replace(" ", "\n", 1) for name in names)
    return Chart("speed", "Tokens per second in the same memory", "", "tokens/s", series, kind="bar", x_ticks=ticks)
