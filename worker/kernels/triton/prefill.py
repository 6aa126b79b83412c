"""Attention of long spans: a program per (tile of queries, KV head) walks the KV tiles in order.

Owns: the prefill kernel and its launch.
Does not: write KV, or split one query tile's KV over programs (worker.kernels.triton.decode does).
Invariants: those of worker.kernels.triton.tile_attention; only rows of the plan's query tiles are written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.kernels.triton.attention_call import AttentionCall
from worker.kernels.triton.query_rows import query_rows
from worker.kernels.triton.tile_attention import LOWEST, attend_tile, merge


@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["spans_ptr", "work_ptr"],
)
def prefill_kernel(
    query_ptr: tl.tensor,
    query_strides: tl.tuple,
    out_ptr: tl.tensor,
    out_strides: tl.tuple,
    kv_ptr: tl.tensor,
    kv_strides: tl.tuple,
    spans_ptr: tl.tensor,  # [S, 5]: row, count, start, table_start, partial_start
    tables_ptr: tl.tensor,
    work_ptr: tl.tensor,  # [P, 2]: span, first query
    scale: tl.tensor,
    window: tl.tensor,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Grid (P, num_kv_heads): the rows of one query tile and KV head."""
    kv_head = tl.program_id(1)
    span_ptr = spans_ptr + tl.load(work_ptr + 2 * tl.program_id(0)) * 5
    first_query = tl.load(work_ptr + 2 * tl.program_id(0) + 1)
    first_row, count, start = tl.load(span_ptr), tl.load(span_ptr + 1), tl.load(span_ptr + 2)
    table_ptr = tables_ptr + tl.load(span_ptr + 3)

    offset, exists, here = query_rows(first_row, count, start, first_query, kv_head, query_strides, GROUP, ROWS)
    dim = tl.arange(0, DIM)
    inside = exists[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(query_ptr + offset[:, None] + dim[None, :], mask=inside, other=0.0).to(DOT)

    high = start + tl.minimum(first_query + ROWS // GROUP, count)
    low = tl.maximum(start + first_query - window + 1, 0)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    sums = tl.full([ROWS, DIM], 0.0, tl.float32)
    for tile in range(low // TILE * TILE, high, TILE):
        tile_top, tile_total, tile_sums = attend_tile(
            q, here, kv_ptr, kv_strides, table_ptr, kv_head, tl.maximum(tile, low), tl.minimum(tile + TILE, high),
            window, scale, SOFTCAP, HEAD_DIM, DIM, BLOCK_SIZE, STEP, DOT,
        )  # fmt: skip
        top, total, sums = merge(top, total, sums, tile_top, tile_total, tile_sums)

    offset, exists, here = query_rows(first_row, count, start, first_query, kv_head, out_strides, GROUP, ROWS)
    tl.store(out_ptr + offset[:, None] + dim[None, :], sums / total[:, None], mask=inside)


def launch_prefill(call: AttentionCall) -> None:
    """The rows of the plan's query tiles; nothing when there are none."""
    work, shape = call.plan.query_tiles, call.shape
    if not len(work):
        return
    prefill_kernel[(len(work), call.layer_kv.shape[2])](
        call.query,
        call.query.stride()[:2],
        call.out,
        call.out.stride()[:2],
        call.layer_kv,
        call.layer_kv.stride()[:4],
        call.plan.spans,
        call.plan.tables,
        work,
        call.scale,
        call.window,
        ROWS=shape.prefill_rows,
        num_warps=shape.prefill_warps,
        num_stages=shape.stages,
        **call.constants,
    )
