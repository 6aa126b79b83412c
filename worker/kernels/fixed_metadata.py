"""FixedMetadata: a decode step that only the device knows, in tensors whose shapes do not follow its lengths.

    row b is position positions[b] of the sequence with the blocks block_tables[b, 0], block_tables[b, 1], ...

A captured CUDA graph repeats launches with the same arguments, so that whatever changes from step to step must be
read from memory that stays where it is.

Owns: the form, also of padding rows: slot -1, which is written nowhere, position 0 and a table of zeros.
Does not: fill the tensors or capture (worker.models.graphed_executor), or say which backends take it.
Invariants: one row per sequence; the outputs of padding rows are garbage that no other row depends on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.kernels.base import AttentionMetadata


@dataclass(frozen=True, slots=True)
class FixedMetadata(AttentionMetadata):
    """`spans` is empty; `slot_mapping` is as always."""

    positions: torch.Tensor  # [B] int64
    block_tables: torch.Tensor  # [B, width] int64, contiguous
