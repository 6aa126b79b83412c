"""CpuAttention: paged attention by the native kernels, for any model whose layers run in torch.

Inside a block, K is [head_dim / s][block_size][s] and V is [block_size / s][head_dim][s], with s = 2 for bfloat16 and
1 otherwise: both are then panels that the matrix kernels read in sequence.

Owns: the translation from torch tensors to the native call.
Does not: choose instruction sets by itself (worker.kernels.native) or run whole models (worker.models.cpu_decoder).
Invariants: those of AttentionBackend; the bytes of a block mean something only to this backend and to CpuDecoder.
"""

from __future__ import annotations

from array import array
from itertools import chain

import torch

from worker.kernels import native
from worker.kernels.base import AttentionMetadata

CPU_LAYOUT = "block,layer,kv,head,paired"


class CpuAttention:
    name = "cpu"
    layout = CPU_LAYOUT

    def __init__(self, threads: int, instruction_set: str = "") -> None:
        self._pool = native.thread_pool(threads)
        self._wanted = instruction_set
        self._made: dict[tuple[int, int, int, int], object] = {}

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
        rows, heads, head_dim = query.shape
        block_size = layer_kv.shape[3]
        out = torch.empty((rows, heads * head_dim), dtype=torch.float32)
        tables = [span.block_table.tolist() for span in metadata.spans]
        spans = [(span.count, span.start, len(table)) for span, table in zip(metadata.spans, tables, strict=True)]
        self._kernel(heads, key.shape[1], head_dim, block_size).forward(
            qkv=torch.cat((query, key, value), dim=1).flatten(1).float().contiguous(),
            out=out,
            spans=array("i", chain.from_iterable(spans)),
            tables=array("i", chain.from_iterable(tables)),
            kv=layer_kv.data_ptr(),
            num_blocks=layer_kv.shape[0],
            dtype=str(layer_kv.dtype).removeprefix("torch."),
            block_stride=layer_kv.stride(0),
            v_offset=layer_kv.stride(1),
            block_size=block_size,
            scale=scale,
            window=sliding_window or 0,
            softcap=softcap or 0.0,
        )
        return out.view(rows, heads, head_dim).to(query.dtype)

    def _kernel(self, heads: int, kv_heads: int, head_dim: int, block_size: int):  # type: ignore[no-untyped-def]
        key = (heads, kv_heads, head_dim, block_size)
        if key not in self._made:
            isa = native.instruction_set(block_size, head_dim, self._wanted)
            if isa is None:
                raise ValueError(f"no native attention for block size {block_size} and head dim {head_dim}")
            self._made[key] = native.module().Attention(self._pool, isa, heads, kv_heads, head_dim)
        return self._made[key]
