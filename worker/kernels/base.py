"""AttentionBackend: paged attention of one layer over the pool.

Owns: the protocol and AttentionMetadata, the per-step description shared by all layers.
Does not: allocate blocks or know models.
Invariants: KV never leaves its blocks as one contiguous copy; the KV reduction order depends on KV position only
(fixed tiles), never on the batch, the piece or the query count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """Rows [row, row + count) of the flat batch are positions [start, start + count) of one sequence."""

    row: int
    count: int
    start: int
    block_table: torch.Tensor  # [num_blocks_of_seq] int64, on the pool's device

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    spans: tuple[SequenceSpan, ...]
    slot_mapping: torch.Tensor  # [T] int64: block_id * block_size + offset of every row


class AttentionBackend(Protocol):
    name: str
    layout: str  # names the order of numbers inside a block, which is the backend's own

    def forward(
        self,
        query: torch.Tensor,  # [T, num_heads, head_dim]
        key: torch.Tensor,  # [T, num_kv_heads, head_dim]
        value: torch.Tensor,  # [T, num_kv_heads, head_dim]
        layer_kv: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], a strided view of the pool
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:  # [T, num_heads, head_dim]
        """Write key/value into their slots, then attend causally over each sequence's blocks."""
