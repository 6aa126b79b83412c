"""`kvray bench calibrate`: time steps of many shapes on a real model and write its step-time model.

Owns: batches made by hand for each step of the schedule, rounds over it until the time is up, and the file.
Does not: choose the steps or fit (calibration).
Invariants: the first round only warms up, and leaves out the largest steps when time is short; every shape is timed
equally often, at least once; the numbers in the file are what `kvray simulate --step-time` reads.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cluster.bench.calibration import Calibration, CalibrationLimits, CalibrationStep, calibrate, schedule, tells_apart
from cluster.config import EngineConfig
from cluster.core.errors import ConfigError
from cluster.core.sampling import SamplingParams
from cluster.core.step_time import StepShape
from cluster.progress import resolve_with_progress
from worker.batch import Batch, ScheduledSeq
from worker.model_runner import ModelRunner
from worker.runner import ModelFacts

_GREEDY = SamplingParams(temperature=0.0)
_TOKENS = 1000  # ids that every vocabulary has
_WARM_UP_SHARE = 0.3  # of the time; a later round takes about as long
_UNITS = ("per step", "per prefill token", "per prefill token and position", "per decode row", "per decode position")


def run_calibrate(config: EngineConfig, *, seconds: float, json_file: Path | None) -> int:
    """`seconds`: about how long, after loading; a slow machine takes longer, because some steps must be timed."""
    console = Console(stderr=True)
    runner = ModelRunner(config, resolve_with_progress(config.model, console))
    runner.pool.tensor.zero_()  # whatever the memory held could be slow to compute with
    limits = _limits(config, runner.facts)
    steps = schedule(limits)
    result = calibrate(_measure(runner, steps, seconds, console))
    _show(result)
    if json_file is not None:
        _write(json_file, result, config, runner.facts)
    return 0


def _limits(config: EngineConfig, facts: ModelFacts) -> CalibrationLimits:
    return CalibrationLimits(
        token_budget=config.token_budget,
        max_num_seqs=config.max_num_seqs,
        max_model_len=facts.max_model_len,
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
    )


def _measure(
    runner: ModelRunner, steps: list[CalibrationStep], seconds: float, console: Console
) -> dict[StepShape, list[float]]:
    times: dict[StepShape, list[float]] = defaultdict(list)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("warming up", total=seconds)
        batches: list[tuple[CalibrationStep, Batch]] = []
        began = ended = time.perf_counter()
        for step in steps:
            if ended - began > seconds * _WARM_UP_SHARE and tells_apart([one for one, _ in batches]):
                break
            batches.append((step, make_batch(step, runner.facts)))
            runner.run(batches[-1][1])
            ended = time.perf_counter()
            progress.update(bar, completed=ended - began)
        progress.update(bar, description="measuring")
        random.Random(0).shuffle(batches)  # whatever slows the machine down for a while shall hit every kind of step
        while not times or ended - began < seconds:
            for step, batch in batches:
                started = time.perf_counter()
                runner.run(batch)
                ended = time.perf_counter()
                times[step.shape].append(ended - started)
                progress.update(bar, completed=ended - began)
    return times


@dataclass(slots=True)
class _Blocks:
    """Hands out the pool from its beginning."""

    block_size: int
    taken: int = 0

    def take(self, num_tokens: int) -> list[int]:
        begin = self.taken
        self.taken += -(-num_tokens // self.block_size)
        return list(range(begin, self.taken))


def make_batch(step: CalibrationStep, facts: ModelFacts) -> Batch:
    """Rows of one step; their KV is whatever the pool holds, which takes the same time to read."""
    blocks = _Blocks(facts.block_size)
    tokens = itertools.cycle(range(1, min(_TOKENS, facts.vocab_size)))
    rows = [
        ScheduledSeq(f"decode{n}", [next(tokens)], step.length - 1, blocks.take(step.length), True, _GREEDY)
        for n in range(step.rows)
    ]
    if step.piece:
        piece = list(itertools.islice(tokens, step.piece))
        table = blocks.take(step.start + step.piece)
        rows.append(ScheduledSeq("prefill", piece, step.start, table, True, _GREEDY))
    return Batch(tuple(rows))


def _show(result: Calibration) -> None:
    table = Table("step time", "seconds")
    table.columns[1].justify = "right"
    for unit, value in zip(_UNITS, result.model.to_wire(), strict=True):
        table.add_row(unit, f"{value:.3e}")
    console = Console()
    console.print(table)
    console.print(f"{result.steps} steps, R² {result.r2:.4f}, median error {result.median_error:.1%}", highlight=False)


def _write(path: Path, result: Calibration, config: EngineConfig, facts: ModelFacts) -> None:
    content = {
        "step_time": result.model.to_wire(),
        "steps": result.steps,
        "r2": result.r2,
        "median_relative_error": result.median_error,
        "model": facts.model,
        "device": facts.device,
        "dtype": facts.dtype,
        "attention": facts.attention,
        "threads": config.threads,
        "token_budget": config.token_budget,
        "block_size": facts.block_size,
        "num_blocks": facts.num_blocks,
    }
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None
