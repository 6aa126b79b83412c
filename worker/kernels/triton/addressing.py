"""Where a slot lies in the pool.

Owns: the offset of a slot's first number inside one layer's view of the pool.
Does not: load or store.
Invariants: offsets are int64, whatever the types of the indices, since a pool holds more than 2^31 numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slot_offset(block: tl.tensor, head: tl.tensor, slot: tl.tensor, strides: tl.tuple) -> tl.tensor:
    """Elements from the view's start to K of [block, head, slot]; V lies `strides[1]` further.

    `strides` are those of [num_blocks, 2, num_kv_heads, block_size, head_dim] without the last, which is 1.
    """
    in_block = head.to(tl.int64) * strides[2] + slot.to(tl.int64) * strides[3]
    return block.to(tl.int64) * strides[0] + in_block
