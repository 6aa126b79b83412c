"""GatheredAttention: the kernel of pitfall 5.3: copy a sequence's blocks into one tensor, then attend as if there were
no blocks.

Owns: that way of doing it, with torch's own attention behind the copy.
Does not: serve anything; it is here to be measured.
Invariants: as AttentionBackend, but for the one that it breaks on purpose: KV leaves its blocks as a contiguous copy.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from cluster.lab.attention_case import PLAIN_LAYOUT
from worker.kernels.base import AttentionMetadata


class GatheredAttention:
    name = "gathered"
    layout = PLAIN_LAYOUT

    def __init__(self) -> None:
        self.copied_bytes = 0  # by the last call

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_kv: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        assert sliding_window is None and softcap is None, "the comparison needs neither"
        slots, block_size = metadata.slot_mapping, layer_kv.shape[3]
        layer_kv[slots // block_size, :, :, slots % block_size] = torch.stack((key, value), dim=1)
        output = torch.empty_like(query)
        self.copied_bytes = 0
        for span in metadata.spans:
            blocks = layer_kv[span.block_table].permute(1, 2, 0, 3, 4)
            kv = blocks.reshape(2, layer_kv.shape[2], -1, layer_kv.shape[4])[:, :, : span.end]
            self.copied_bytes += kv.nbytes
            rows = slice(span.row, span.row + span.count)
            positions = torch.arange(span.start, span.end)
            mask = None if span.count == 1 else torch.arange(span.end)[None, :] <= positions[:, None]
            found = scaled_dot_product_attention(
                query[rows].transpose(0, 1)[None], kv[0][None], kv[1][None], mask, scale=scale, enable_gqa=True
            )
            output[rows] = found[0].transpose(0, 1)
        return output
