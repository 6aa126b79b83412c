"""FlashStep: what flash_attn_varlen_func must know of a step, the same for all its layers.

    sequence b owns query rows   cu_seqlens_q[b] .. cu_seqlens_q[b + 1]
    and key positions            0 .. seqused_k[b], found in blocks block_table[b, 0], block_table[b, 1], ...

Owns: building these tensors from AttentionMetadata with two copies to the device.
Does not: call a kernel.
Invariants: every entry of the block table is a block of its own sequence, also the padding; the table covers whole
key tiles, because the kernels look up the blocks of a tile's last rows even when the sequence ends before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from worker.kernels.base import AttentionMetadata

KEY_TILE = 256  # the largest key tile of any head dim, in positions


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashStep:
    cu_seqlens_q: torch.Tensor  # [B + 1] int32
    cu_seqlens_k: torch.Tensor  # [B + 1] int32
    seqused_k: torch.Tensor  # [B] int32
    block_table: torch.Tensor  # [B, width] int32
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def build(cls, metadata: AttentionMetadata, num_rows: int, block_size: int) -> FlashStep:
        """For at least one span. The spans must be in row order and cover all rows."""
        spans = metadata.spans
        queries, keys = [span.count for span in spans], [span.end for span in spans]
        starts_q, starts_k = [0, *accumulate(queries)], [0, *accumulate(keys)]
        if [span.row for span in spans] != starts_q[:-1] or starts_q[-1] != num_rows:
            raise ValueError(f"the spans do not cover the {num_rows} rows in order")
        device = metadata.slot_mapping.device
        lengths = torch.tensor([*starts_q, *starts_k, *keys], dtype=torch.int32).to(device, non_blocking=True)
        cu_seqlens_q, cu_seqlens_k, seqused_k = lengths.split([len(starts_q), len(starts_k), len(keys)])
        return cls(
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_k=seqused_k,
            block_table=_block_table([span.block_table for span in spans], keys, block_size),
            max_seqlen_q=max(queries),
            max_seqlen_k=max(keys),
        )


def _block_table(tables: list[torch.Tensor], keys: list[int], block_size: int) -> torch.Tensor:
    """One row per sequence, filled up with the sequence's last block."""
    needed = torch.tensor([-(-length // block_size) for length in keys])
    held = torch.tensor([len(table) for table in tables])
    if bool((held < needed).any()):
        raise ValueError("a sequence does not fit its block table")
    positions = -(-max(keys) // KEY_TILE) * KEY_TILE
    column = torch.arange(-(-positions // block_size))
    index = (held.cumsum(0) - held)[:, None] + torch.minimum(column, needed[:, None] - 1)
    every = torch.cat(tables)
    return every[index.to(every.device, non_blocking=True)].int()
