"""PagedRun: one sequence through a model and a small pool with the reference attention, all logits kept."""

from __future__ import annotations

from typing import Any

import torch

from worker.kernels.base import AttentionMetadata, SequenceSpan
from worker.kernels.reference import ReferenceAttention
from worker.kvcache.kv_pool import KvGeometry, KvPool
from worker.models.attention_hook import PagedStep

BLOCK_SIZE = 4


class PagedRun:
    """`feed` computes the next tokens of the sequence; what came before is in the pool."""

    def __init__(self, model: Any, max_tokens: int = 128) -> None:
        g, blocks = model.geometry, -(-max_tokens // BLOCK_SIZE)
        geometry = KvGeometry(
            num_layers=g.num_layers,
            num_kv_heads=g.num_kv_heads,
            head_dim=g.head_dim,
            block_size=BLOCK_SIZE,
            dtype=model.dtype,
        )
        self._model, self._pool = model, KvPool(geometry, blocks, torch.device("cpu"))
        self._pool.tensor.fill_(float("nan"))
        self._table = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))
        self._length = 0

    @torch.inference_mode()
    def feed(self, tokens: list[int]) -> torch.Tensor:
        """The logits of every one of `tokens`: [len(tokens), vocab_size]."""
        start, count = self._length, len(tokens)
        self._length += count
        at = torch.arange(start, start + count)
        slots = self._table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        span = SequenceSpan(row=0, count=count, start=start, block_table=self._table)
        step = PagedStep(self._pool, ReferenceAttention(), AttentionMetadata(spans=(span,), slot_mapping=slots))
        logits: torch.Tensor = self._model.forward(torch.tensor(tokens), at, torch.arange(count), step)
        return logits
