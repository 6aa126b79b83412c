"""Attention of some query rows over one tile of KV positions, and the merging of two results.

A partial result of a row is (top, total, sums): the largest score, the sum of 2^(score - top), and the values weighted
by it. Scores are in powers of two, so `scale` carries a factor log2(e). Online softmax: Milakov and Gimelshein 2018
(arXiv:1805.02867); its tiled form over keys and values: Dao et al. 2022 (arXiv:2205.14135).

Owns: the arithmetic of attention, the same for prefill and decode.
Does not: know spans, or where query rows come from and results go.
Invariants: sums are fp32; a tile starts from nothing and is merged as a whole, so the order of every sum is a function
of KV positions; a step or tile in which a row sees nothing is an exact no-op; no number outside [low, high) is loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.kernels.triton.addressing import slot_offset

LOWEST = tl.constexpr(-1e30)  # finite, so that a row that sees nothing gives 0 and not NaN
TWO_LOG2E = tl.constexpr(2.8853900817779268)


@triton.jit
def attend_tile(
    q: tl.tensor,  # [ROWS, DIM] of type DOT, zero beyond the head's own dims
    here: tl.tensor,  # [ROWS] the position of each row
    kv_ptr: tl.tensor,
    kv_strides: tl.tuple,
    table_ptr: tl.tensor,  # the sequence's block table
    head: tl.tensor,
    low: tl.tensor,  # positions [low, high) of this tile are seen by some row
    high: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    SOFTCAP: tl.constexpr,  # in powers of two; 0 means none
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    STEP: tl.constexpr,  # positions of one product; divides the tile
    DOT: tl.constexpr,
) -> tl.tensor:
    """(top, total, sums) of every row over the positions [low, high)."""
    dim = tl.arange(0, DIM)
    top = tl.full([q.shape[0]], LOWEST, tl.float32)
    total = tl.full([q.shape[0]], 0.0, tl.float32)
    sums = tl.full([q.shape[0], DIM], 0.0, tl.float32)
    for first in range(low // STEP * STEP, high, STEP):
        position = first + tl.arange(0, STEP)
        exists = (position >= low) & (position < high)
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=exists, other=0)
        offset = slot_offset(block, head, position % BLOCK_SIZE, kv_strides)[:, None] + dim[None, :]
        inside = exists[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(kv_ptr + offset, mask=inside, other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP > 0.0:
            scores = SOFTCAP * tanh(scores / SOFTCAP)
        seen = (position[None, :] <= here[:, None]) & (position[None, :] > here[:, None] - window) & exists[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        v = tl.load(kv_ptr + kv_strides[1] + offset, mask=inside, other=0.0).to(DOT)
        total = total * fade + tl.sum(weights, 1)
        sums = tl.dot(weights.to(DOT), v, sums * fade[:, None], input_precision="ieee")
        top = new_top
    return top, total, sums


@triton.jit
def merge(
    top: tl.tensor, total: tl.tensor, sums: tl.tensor, tile_top: tl.tensor, tile_total: tl.tensor, tile_sums: tl.tensor
) -> tl.tensor:
    """(top, total, sums) so far together with those of the next tile."""
    new_top = tl.maximum(top, tile_top)
    fade = tl.exp2(top - new_top)
    tile_fade = tl.exp2(tile_top - new_top)
    total = total * fade + tile_total * tile_fade
    sums = sums * fade[:, None] + tile_sums * tile_fade[:, None]
    return new_top, total, sums


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """From one power of two that cannot overflow; about 1e-7 from the exact value."""
    small = tl.exp2(tl.abs(x) * -TWO_LOG2E)
    result = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0.0, -result, result)
