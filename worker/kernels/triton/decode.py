"""Attention of short spans: a program per (KV tile of a span, KV head), then one that merges the tiles in order.

One decode row over a long context is too little work for one program, so its KV is split (split-KV decode, called
Flash-Decoding by Dao, Haziza, Massa and Sizov, 2023). A split is always one tile, so that the number of splits is no
choice and cannot change an answer.

Owns: the split and merge kernels, their launch, and the memory of the partial results.
Does not: write KV.
Invariants: those of worker.kernels.triton.tile_attention; only rows of the plan's merge rows are written; a partial
result is read only where it was written in the same call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.triton.attention_call import AttentionCall
from worker.kernels.triton.query_rows import query_rows
from worker.kernels.triton.tile_attention import LOWEST, attend_tile, merge


@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["spans_ptr", "work_ptr"],
)
def split_kernel(
    query_ptr: tl.tensor,
    query_strides: tl.tuple,
    tops_ptr: tl.tensor,  # [D, num_kv_heads, ROWS, 2]: top, total
    sums_ptr: tl.tensor,  # [D, num_kv_heads, ROWS, DIM]
    kv_ptr: tl.tensor,
    kv_strides: tl.tuple,
    spans_ptr: tl.tensor,  # [S, 5]: row, count, start, table_start, partial_start
    tables_ptr: tl.tensor,
    work_ptr: tl.tensor,  # [D, 2]: span, tile
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
    """Grid (D, num_kv_heads): the partial result of all rows of one short span over one KV tile."""
    kv_head = tl.program_id(1)
    span_ptr = spans_ptr + tl.load(work_ptr + 2 * tl.program_id(0)) * 5
    tile = tl.load(work_ptr + 2 * tl.program_id(0) + 1) * TILE
    first_row, count, start = tl.load(span_ptr), tl.load(span_ptr + 1), tl.load(span_ptr + 2)
    table_ptr = tables_ptr + tl.load(span_ptr + 3)
    low = tl.maximum(start - window + 1, tile)
    high = tl.minimum(start + count, tile + TILE)
    if low >= high:  # the whole tile is before the window
        return

    offset, exists, here = query_rows(first_row, count, start, 0, kv_head, query_strides, GROUP, ROWS)
    dim = tl.arange(0, DIM)
    inside = exists[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(query_ptr + offset[:, None] + dim[None, :], mask=inside, other=0.0).to(DOT)
    top, total, sums = attend_tile(
        q, here, kv_ptr, kv_strides, table_ptr, kv_head, low, high,
        window, scale, SOFTCAP, HEAD_DIM, DIM, BLOCK_SIZE, STEP, DOT,
    )  # fmt: skip

    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + kv_head
    slot = program * ROWS + tl.arange(0, ROWS)
    tl.store(tops_ptr + slot * 2, top, mask=exists)
    tl.store(tops_ptr + slot * 2 + 1, total, mask=exists)
    tl.store(sums_ptr + slot[:, None] * DIM + dim[None, :], sums, mask=exists[:, None])


@triton.jit(
    do_not_specialize=["window", "num_kv_heads"],
    do_not_specialize_on_alignment=["spans_ptr", "work_ptr"],
)
def merge_kernel(
    tops_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_strides: tl.tuple,
    spans_ptr: tl.tensor,
    work_ptr: tl.tensor,  # [R, 2]: span, query
    num_kv_heads: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Grid (R, num_heads): one output row of one head from its partial results, in tile order."""
    head = tl.program_id(1)
    span_ptr = spans_ptr + tl.load(work_ptr + 2 * tl.program_id(0)) * 5
    query = tl.load(work_ptr + 2 * tl.program_id(0) + 1)
    row = tl.load(span_ptr) + query
    here = tl.load(span_ptr + 2) + query
    first_slot = (query * GROUP + head % GROUP) + head // GROUP * ROWS
    first_partial = tl.load(span_ptr + 4)

    dim = tl.arange(0, DIM)
    one = tl.arange(0, 1)
    top = tl.full([1], LOWEST, tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    sums = tl.full([1, DIM], 0.0, tl.float32)
    for tile in tl.range(tl.maximum(here - window + 1, 0) // TILE, here // TILE + 1, num_stages=4):
        slot = (first_partial + tile).to(tl.int64) * (num_kv_heads * ROWS) + first_slot + one
        tile_top = tl.load(tops_ptr + slot * 2)
        tile_total = tl.load(tops_ptr + slot * 2 + 1)
        tile_sums = tl.load(sums_ptr + slot[:, None] * DIM + dim[None, :])
        top, total, sums = merge(top, total, sums, tile_top, tile_total, tile_sums)

    offset = row.to(tl.int64) * out_strides[0] + head.to(tl.int64) * out_strides[1]
    tl.store(out_ptr + offset + one[:, None] + dim[None, :], sums / total[:, None], mask=(dim < HEAD_DIM)[None, :])


def launch_decode(call: AttentionCall) -> None:
    """The rows of the plan's short spans; nothing when there are none."""
    plan, shape, constants = call.plan, call.shape, call.constants
    if not len(plan.kv_tiles):
        return
    kv_heads = call.layer_kv.shape[2]
    slots = (len(plan.kv_tiles), kv_heads, shape.decode_rows)
    tops = torch.empty((*slots, 2), dtype=torch.float32, device=call.query.device)
    sums = torch.empty((*slots, constants["DIM"]), dtype=torch.float32, device=call.query.device)
    split_kernel[(len(plan.kv_tiles), kv_heads)](
        call.query,
        call.query.stride()[:2],
        tops,
        sums,
        call.layer_kv,
        call.layer_kv.stride()[:4],
        plan.spans,
        plan.tables,
        plan.kv_tiles,
        call.scale,
        call.window,
        ROWS=shape.decode_rows,
        num_warps=shape.decode_warps,
        num_stages=shape.stages,
        **constants,
    )
    merge_kernel[(len(plan.merge_rows), call.query.shape[1])](
        tops,
        sums,
        call.out,
        call.out.stride()[:2],
        plan.spans,
        plan.merge_rows,
        kv_heads,
        call.window,
        ROWS=shape.decode_rows,
        num_warps=1,
        **{name: constants[name] for name in ("GROUP", "HEAD_DIM", "DIM", "TILE")},
    )
