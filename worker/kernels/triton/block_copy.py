"""Whole blocks of the pool, all layers, onto other blocks: copy-on-write for many blocks in one launch.

Owns: the copy kernel and its launch.
Does not: decide which blocks are copied (worker.kvcache), or check ids (that would wait for the device).
Invariants: offsets are int64; a block is copied bit for bit; the targets are distinct and none is a source, else the
result depends on the order of programs, which is not fixed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096  # bytes per program


@triton.jit
def copy_kernel(
    pool_ptr: tl.tensor,
    block_stride: tl.tensor,
    sources_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    length: tl.tensor,  # numbers of one block
    CHUNK: tl.constexpr,
) -> None:
    """Grid (chunks, n): one chunk of one block."""
    source = tl.load(sources_ptr + tl.program_id(1)).to(tl.int64) * block_stride
    target = tl.load(targets_ptr + tl.program_id(1)).to(tl.int64) * block_stride
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    tl.store(pool_ptr + target + at, tl.load(pool_ptr + source + at, mask=at < length), mask=at < length)


def copy_blocks(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Block `sources[i]` onto block `targets[i]` for every i; both are [n] integers on the pool's device, n < 65536.

    `pool` is [num_blocks, ...] (worker.kvcache.kv_pool), each block contiguous, else ValueError.
    """
    if not pool[0].is_contiguous():
        raise ValueError("a block of the pool is not contiguous")
    if not len(sources):
        return
    words = pool.flatten(1).view(torch.int16) if pool.element_size() == 2 else pool.flatten(1)
    chunk = CHUNK // words.element_size()
    length = words.shape[1]
    copy_kernel[(triton.cdiv(length, chunk), len(sources))](
        words, words.stride(0), sources, targets, length, CHUNK=chunk, num_warps=4
    )
