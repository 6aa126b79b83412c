"""FixedReference: the reference backend for FixedMetadata too, so that captured steps can be tested on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from worker.kernels.base import AttentionMetadata, SequenceSpan
from worker.kernels.fixed_metadata import FixedMetadata
from worker.kernels.reference import ReferenceAttention


class FixedReference:
    """Called as a backend that can be captured; outputs of padding rows are NaN."""

    name, layout = "triton", ReferenceAttention.layout

    def __init__(self) -> None:
        self.fixed_calls = 0

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_kv: torch.Tensor,
        metadata: AttentionMetadata,
        **options: Any,
    ) -> torch.Tensor:
        if not isinstance(metadata, FixedMetadata):
            return ReferenceAttention().forward(query, key, value, layer_kv, metadata, **options)
        self.fixed_calls += 1
        out = torch.full_like(query, float("nan"))
        real = int((metadata.slot_mapping >= 0).sum())  # padding comes last
        if real:
            starts = metadata.positions[:real].tolist()
            spans = tuple(SequenceSpan(b, 1, start, metadata.block_tables[b]) for b, start in enumerate(starts))
            step = AttentionMetadata(spans, metadata.slot_mapping[:real])
            rows = (x[:real] for x in (query, key, value))
            out[:real] = ReferenceAttention().forward(*rows, layer_kv, step, **options)
        return out
