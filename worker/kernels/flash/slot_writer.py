"""write_kv: put new keys and values into their slots, in plain torch.

Owns: the default writer, and the shape that every other writer has.
Does not: attend, or run fast: it is a few launches per layer where a kernel needs one.
Invariants: only the given slots change; numbers are rounded to the pool's dtype and nothing else.
"""

from __future__ import annotations

from typing import Protocol

import torch


class KvWriter(Protocol):
    def __call__(
        self,
        key: torch.Tensor,  # [T, num_kv_heads, head_dim]
        value: torch.Tensor,  # [T, num_kv_heads, head_dim]
        layer_kv: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], a strided view of the pool
        slot_mapping: torch.Tensor,  # [T] int64
        /,
    ) -> None:
        """Row t of key and value goes to slot_mapping[t]."""


def write_kv(key: torch.Tensor, value: torch.Tensor, layer_kv: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    block_size = layer_kv.shape[3]
    rows = torch.stack((key, value), dim=1).to(layer_kv.dtype)  # [T, 2, num_kv_heads, head_dim]
    layer_kv[slot_mapping // block_size, :, :, slot_mapping % block_size] = rows
