"""VirtualRunner: a Runner without a model: a step takes the time that the step-time model predicts.

Owns: moving the clock on, and the totals over all steps.
Does not: compute anything; every sampled token is FILLER, which no prompt of a trace contains.
Invariants: as worker.runner.Runner; no answer ends before its length is reached.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.core.step_time import StepShape, StepTimeModel
from cluster.simulate.virtual_clock import VirtualClock
from worker.batch import Batch
from worker.runner import ModelFacts, Sampled
from worker.step_shape import step_shape

VOCAB_SIZE = 32_000
FILLER = 0
_SAMPLED = Sampled(FILLER)


class VirtualRunner:
    """`on_batch` sees every batch when its step begins."""

    def __init__(
        self, facts: ModelFacts, model: StepTimeModel, clock: VirtualClock, on_batch: Callable[[Batch], None]
    ) -> None:
        self._facts = facts
        self._model = model
        self._clock = clock
        self._on_batch = on_batch
        self.steps = 0
        self.prefill_tokens = 0
        self.busy_s = 0.0

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    def run(self, batch: Batch) -> list[Sampled]:
        self._on_batch(batch)
        self.book(step_shape(batch))
        return [_SAMPLED] * sum(item.sample for item in batch.seqs)

    def book(self, shape: StepShape) -> None:
        """A step of this shape has run."""
        seconds = self._model.seconds(shape)
        self._clock.advance(seconds)
        self.steps += 1
        self.prefill_tokens += shape.prefill_tokens
        self.busy_s += seconds


def virtual_facts(num_blocks: int, block_size: int) -> ModelFacts:
    """Of a model that has no weights: prompts may be as long as the pool allows."""
    return ModelFacts(
        model="virtual",
        vocab_size=VOCAB_SIZE,
        max_model_len=num_blocks * block_size,
        eos_token_ids=(),
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        dtype="bfloat16",
        device="virtual",
        attention="none",
        weight_bytes=0,
        kv_bytes_per_token=1,
        num_blocks=num_blocks,
        block_size=block_size,
        model_revision="virtual",
        kv_fingerprint="virtual",
    )
