"""Section `throughput`: prefill and decode tokens per second of a model, through ModelRunner with synthetic batches.

Owns: the sizes of the steps.
Does not: schedule, reuse prefixes or stream: this is the model step alone, sampling included.
Invariants: a step is warm before it is timed; the KV that a decode step reads is finite.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.gpu.environment import GpuEnvironment, Setup
from benchmarks.gpu.greedy import GREEDY, block_tables
from benchmarks.gpu.random_models import save_demo_sized
from benchmarks.gpu.report import Row
from cluster.config import EngineConfig
from worker.batch import Batch, ScheduledSeq
from worker.model_runner import ModelRunner, free_bytes

MOST_KV, KV_SHARE = 4 << 30, 0.4


@dataclass(frozen=True, slots=True)
class Step:
    """`sequences` of `context` tokens, of which the last `new` are computed."""

    sequences: int
    new: int
    context: int

    def __str__(self) -> str:
        return f"{'decode' if self.new == 1 else 'prefill'} {self.sequences} x {self.context:,}"


STEPS = (
    Step(1, 512, 512),
    Step(1, 2048, 2048),
    Step(4, 2048, 2048),
    Step(1, 1, 512),
    Step(8, 1, 512),
    Step(32, 1, 1024),
    Step(64, 1, 2048),
)


def throughput(environment: GpuEnvironment, steps: Sequence[Step] = STEPS, most_kv: int = MOST_KV) -> Iterator[Row]:
    if environment.model is not None:
        yield from _of_model(environment, environment.model, steps, most_kv)
    elif importlib.util.find_spec("transformers") is None:
        yield Row("throughput", "skipped", "no model on disk, and no transformers to make a random one")
    else:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "random-135M"
            save_demo_sized(path)
            yield from _of_model(environment, path, steps, most_kv)


def _of_model(environment: GpuEnvironment, path: Path, steps: Sequence[Step], most_kv: int) -> Iterator[Row]:
    for setup in environment.fast_setups():
        kv_memory = min(most_kv, int(KV_SHARE * free_bytes(environment.device)))
        config = environment.engine(path, setup, environment.half, kv_memory)
        loaded: list[ModelRunner] = []
        yield environment.attempt(f"{path.name} {environment.half}, {setup}", partial(_load, config, path, loaded))
        while loaded:
            yield from _of_runner(environment, loaded.pop(), setup, steps)


def _of_runner(environment: GpuEnvironment, runner: ModelRunner, setup: Setup, steps: Sequence[Step]) -> Iterator[Row]:
    for step in steps:
        yield environment.attempt(f"{step}, {setup}", partial(_rate, environment, runner, step))


def _load(config: EngineConfig, path: Path, loaded: list[ModelRunner]) -> str:
    runner = ModelRunner(config, path)
    runner.pool.tensor.zero_()
    loaded.append(runner)
    return f"loaded, {runner.facts.num_blocks:,} blocks of {runner.facts.block_size} tokens"


def _rate(environment: GpuEnvironment, runner: ModelRunner, step: Step) -> str:
    batch = synthetic(runner, step)
    seconds = environment.median_seconds(lambda: runner.run(batch))
    return f"{batch.num_tokens / seconds:,.0f} tokens/s ({seconds * 1e3:.2f} ms)"


def synthetic(runner: ModelRunner, step: Step) -> Batch:
    """Skip when the pool or the model is too small."""
    tables, vocabulary = block_tables(runner, [step.context] * step.sequences), runner.facts.vocab_size
    start = step.context - step.new
    return Batch(
        tuple(
            ScheduledSeq(
                seq_id=str(number),
                token_ids=tuple((number * 101 + place * 7) % vocabulary for place in range(step.new)),
                start=start,
                block_ids=table,
                sample=True,
                sampling=GREEDY,
            )
            for number, table in enumerate(tables)
        )
    )
