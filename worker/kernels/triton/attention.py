"""TritonAttention: paged attention by Triton kernels, for any model whose layers run in torch on a CUDA device.

Inside a block the numbers lie as in the reference backend. Proven with Triton's interpreter and by compiling for CUDA
devices without running there: speed, and what the tensor cores make of the last bits, are not measured.

Owns: the checks, the step's plan, and the order of the launches: write KV, then attend.
Does not: choose a device (tensors must be on the current one), capture graphs (worker.models.graphed_executor does), or
check block ids.
Invariants: those of AttentionBackend. A row's bits do not depend on the other spans of its batch. They do not depend
on the piece or the query count either where a row of a product does not depend on its other rows; the order of sums is
made for that, but tensor cores and BLAS do not promise it, so neither does this backend.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.base import AttentionMetadata
from worker.kernels.fixed_metadata import FixedMetadata
from worker.kernels.triton.attention_call import AttentionCall
from worker.kernels.triton.decode import launch_decode
from worker.kernels.triton.fixed_plan import plan_fixed
from worker.kernels.triton.kv_write import dense_rows, write_kv
from worker.kernels.triton.prefill import launch_prefill, prefill_kernel
from worker.kernels.triton.step_plan import StepPlan, plan_step
from worker.kernels.triton.tile_shape import TILE, TileShape, padded, tile_shape

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
NO_WINDOW = 1 << 30  # more positions than any sequence has
INTERPRETED = not isinstance(prefill_kernel, triton.JITFunction)


class TritonAttention:
    name = "triton"
    layout = "block,layer,kv,head,slot,dim"

    def __init__(self) -> None:
        self._planned: tuple[AttentionMetadata, tuple[int, int, int], StepPlan] | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer_kv: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """As AttentionBackend.forward. Products run in the query's type if the pool has it too, else in fp32.

        With FixedMetadata it only launches, so that it can be captured.
        Raises ValueError for a type, head dim, group or block table that does not fit, before anything is written.
        """
        if layer_kv.stride(4) != 1:
            raise ValueError(f"the pool's last dim has stride {layer_kv.stride(4)}, not 1")
        group, head_dim = query.shape[1] // key.shape[1], query.shape[2]
        product_type = _product_type(query.dtype, layer_kv.dtype)
        shape = tile_shape(group, head_dim, product_type.itemsize)
        plan = self._plan(metadata, layer_kv.shape[3], group, shape)
        write_kv(key, value, layer_kv, metadata.slot_mapping)
        out = torch.empty(query.shape, dtype=torch.float32 if INTERPRETED else query.dtype, device=query.device)
        call = AttentionCall(
            query=dense_rows(query),
            out=out,
            layer_kv=layer_kv,
            plan=plan,
            shape=shape,
            scale=scale * math.log2(math.e),
            window=sliding_window or NO_WINDOW,
            constants={
                "SOFTCAP": (softcap or 0.0) * math.log2(math.e),
                "GROUP": group,
                "HEAD_DIM": head_dim,
                "DIM": padded(head_dim),
                "BLOCK_SIZE": layer_kv.shape[3],
                "TILE": TILE,
                "STEP": shape.step,
                "DOT": TYPES[product_type],
            },
        )
        launch_prefill(call)
        launch_decode(call)
        return out.to(query.dtype)

    def _plan(self, metadata: AttentionMetadata, block_size: int, group: int, shape: TileShape) -> StepPlan:
        """The layers of a step share their metadata object, and so this plan."""
        sizes = (block_size, shape.prefill_rows // group, shape.decode_rows // group)
        if self._planned is None or self._planned[0] is not metadata or self._planned[1] != sizes:
            self._planned = (metadata, sizes, _plan_of(metadata, *sizes))
        return self._planned[2]


def _plan_of(metadata: AttentionMetadata, block_size: int, queries_per_tile: int, most_short: int) -> StepPlan:
    if isinstance(metadata, FixedMetadata):
        return plan_fixed(metadata, block_size=block_size, tile=TILE)
    return plan_step(
        metadata, block_size=block_size, tile=TILE, queries_per_tile=queries_per_tile, most_short=most_short
    )


def _product_type(query: torch.dtype, pool: torch.dtype) -> torch.dtype:
    if query not in TYPES or pool not in TYPES:
        raise ValueError(f"no triton attention for queries of {query} and a pool of {pool}")
    if query != pool or (INTERPRETED and query == torch.bfloat16):  # the interpreter has no product of bfloat16
        return torch.float32
    return query
