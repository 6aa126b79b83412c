"""New keys and values into their slots of the pool.

Owns: the write kernel and its launch.
Does not: allocate slots, or check that they are inside the pool (that would wait for the device).
Invariants: nothing but the given slots is written, and nothing for a negative one; no two rows may have the same slot.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton.addressing import slot_offset

ROWS = 16  # of one program


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots_ptr"])
def write_kernel(
    key_ptr: tl.tensor,
    key_strides: tl.tuple,
    value_ptr: tl.tensor,
    value_strides: tl.tuple,
    kv_ptr: tl.tensor,
    kv_strides: tl.tuple,
    slots_ptr: tl.tensor,
    num_rows: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Grid (row groups, num_kv_heads): K and V of ROWS rows of one head."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)[None, :]
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=0)
    inside = ((row < num_rows) & (slot >= 0))[:, None] & (dim < HEAD_DIM)
    target = kv_ptr + slot_offset(slot // BLOCK_SIZE, head, slot % BLOCK_SIZE, kv_strides)[:, None] + dim
    key = tl.load(key_ptr + row[:, None] * key_strides[0] + head * key_strides[1] + dim, mask=inside)
    tl.store(target, key, mask=inside)
    value = tl.load(value_ptr + row[:, None] * value_strides[0] + head * value_strides[1] + dim, mask=inside)
    tl.store(target + kv_strides[1], value, mask=inside)


def write_kv(key: Tensor, value: Tensor, layer_kv: Tensor, slot_mapping: Tensor) -> None:
    """Row t of key and value [T, num_kv_heads, head_dim] into slot `slot_mapping[t]` of the layer's blocks.

    layer_kv is [num_blocks, 2, num_kv_heads, block_size, head_dim], of any strides but 1 in the last dim. A type that
    is not the pool's is converted, to the nearest number.
    """
    rows, heads, head_dim = key.shape
    if not rows:
        return
    key, value = dense_rows(key.to(layer_kv.dtype)), dense_rows(value.to(layer_kv.dtype))
    write_kernel[(triton.cdiv(rows, ROWS), heads)](
        key,
        key.stride()[:2],
        value,
        value.stride()[:2],
        layer_kv,
        layer_kv.stride()[:4],
        slot_mapping,
        rows,
        BLOCK_SIZE=layer_kv.shape[3],
        HEAD_DIM=head_dim,
        DIM=triton.next_power_of_2(head_dim),
        ROWS=ROWS,
        num_warps=4,
    )


def dense_rows(rows: Tensor) -> Tensor:
    """[T, heads, head_dim] with stride 1 in the last dim: itself, but for unusual callers."""
    return rows if rows.stride(2) == 1 else rows.contiguous()
