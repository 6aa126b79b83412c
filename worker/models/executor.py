"""Executor: a loaded model that computes one step over the pool, whatever it is made of.

Owns: the protocol, the description of a step (StepRows), and ExecutorFacts.
Does not: load models (worker.models.loading), allocate blocks or choose tokens.
Invariants: when `compute` returns, the KV of every row is in its block; logits are those of the rows asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from worker.kvcache.kv_pool import KvPool
from worker.models.model_card import ModelProperties


class RowSpan(NamedTuple):
    """`rows` rows at positions [start, start + rows) of the sequence with these blocks."""

    rows: int
    start: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepRows:
    """The flat batch of one step: T rows, cut into spans without gaps."""

    token_ids: Sequence[int]  # T
    spans: Sequence[RowSpan]
    logit_rows: Sequence[int]  # R: the rows whose logits are wanted


class Executor(ModelProperties, Protocol):
    attention: str  # the backend's name
    kv_layout: str  # names the order of numbers inside a block

    def compute(self, rows: StepRows, pool: KvPool) -> torch.Tensor:
        """Logits [R, vocab_size]; valid until the next call."""
