"""What the flash kernels can take: sizes, dtypes and the strides of a layer of the pool.

The kernels load 16 bytes at a time, and a thread's rows (up to 16) must lie in one block. vllm-flash-attn 2.6.2 says
"multiple of 256" in the text of flash_attn_with_kvcache, but its binary asks for a multiple of 16.

Owns: these limits, in words that say what to change.
Does not: know which package is installed (worker.kernels.flash.installed).
Invariants: what passes here is never copied or padded inside the package, and never refused by it.
"""

from __future__ import annotations

import torch

BLOCK_MULTIPLE = 16
HEAD_DIM_MULTIPLE, MAX_HEAD_DIM = 8, 256
DTYPES = (torch.float16, torch.bfloat16)

_LOAD_NUMBERS = 8  # 16 bytes of a 2-byte dtype
_MAX_BLOCK_STRIDE = 2**31 - 1  # the kernels hold it in 32 bits; offsets made with it are 64-bit


def why_not_sizes(block_size: int, head_dim: int, dtype: torch.dtype) -> str | None:
    """The reason why the kernels cannot work with these, None when they can."""
    if block_size % BLOCK_MULTIPLE:
        return f"block size {block_size} is not a multiple of {BLOCK_MULTIPLE}"
    if head_dim % HEAD_DIM_MULTIPLE or head_dim > MAX_HEAD_DIM:
        return f"head dim {head_dim} is not a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}"
    if dtype not in DTYPES:
        return f"KV in {str(dtype).removeprefix('torch.')} is neither float16 nor bfloat16"
    return None


def why_not_layer(layer_kv: torch.Tensor) -> str | None:
    """The same for a view [num_blocks, 2, num_kv_heads, block_size, head_dim] of the pool."""
    *outer, last = layer_kv.stride()
    if last != 1:
        return f"the head dim of the pool's view has stride {last} instead of 1"
    if outer[0] > _MAX_BLOCK_STRIDE:
        return f"a block of all layers has {outer[0]} numbers, more than {_MAX_BLOCK_STRIDE}; take smaller blocks"
    if any(stride % _LOAD_NUMBERS for stride in (*outer, layer_kv.storage_offset())):
        where = f"offset {layer_kv.storage_offset()}, strides {tuple(layer_kv.stride())}"
        return f"the pool's view ({where}) is not a multiple of {_LOAD_NUMBERS} numbers everywhere"
    return why_not_sizes(layer_kv.shape[3], layer_kv.shape[4], layer_kv.dtype)
