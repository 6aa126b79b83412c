"""The order of numbers in the pool, measured (article 2.2): block-first or layer-first, K plain or transposed.

    block-first   (blocks, layers, 2, KV heads, block, dim)    the article's, and ours: a block is one piece of memory
    layer-first   (layers, 2, blocks, KV heads, block, dim)    a layer is one piece of memory
    K transposed  (.., dim, block) instead of (.., block, dim)

Owns: a decode read of one layer in both pools by the same kernel, scores over both forms of K, and copies of a block.
Does not: choose a layout.
Invariants: both pools hold the same numbers and give the same answer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cluster.lab.attention_case import AttentionCase, CaseShape, HeadShape, quickest
from worker.kernels import native
from worker.kernels.base import AttentionBackend
from worker.kernels.cpu import CpuAttention
from worker.kernels.reference import ReferenceAttention


def read_seconds(heads: HeadShape, shape: CaseShape, rounds: int, seed: int) -> dict[str, float]:
    """Decode attention of one layer: `block_first` and `layer_first`."""
    case = AttentionCase(heads, shape, seed)
    fast = native.instruction_set(shape.block_size, heads.head_dim) is not None
    backend: AttentionBackend = CpuAttention(1) if fast else ReferenceAttention()
    block_first = case.pool()
    layers = (
        case.pool()
        .tensor.view(-1)
        .view(shape.layers, 2, case.num_blocks, heads.kv_heads, shape.block_size, heads.head_dim)
    )
    works: dict[str, Callable[[], torch.Tensor]] = {
        "block_first": case.prepared(backend, block_first.layer),
        "layer_first": case.prepared(backend, lambda layer: layers[layer].transpose(0, 1)),
    }
    first, second = (work() for work in works.values())
    assert torch.equal(first, second), "the layout changed an answer"
    return quickest(works, rounds)


def score_seconds(heads: HeadShape, shape: CaseShape, rounds: int, seed: int) -> dict[str, float]:
    """Scores of one query over all blocks, in plain torch: K as (block, dim), `plain`, and as (dim, block)."""
    generator = torch.Generator().manual_seed(seed)
    blocks = shape.sequences * shape.length // shape.block_size
    group = heads.heads // heads.kv_heads
    query = torch.randn(heads.kv_heads, group, heads.head_dim, generator=generator)
    plain = torch.randn(blocks, heads.kv_heads, shape.block_size, heads.head_dim, generator=generator)
    transposed = plain.transpose(2, 3).contiguous()
    works: dict[str, Callable[[], torch.Tensor]] = {
        "plain": lambda: torch.matmul(query, plain.transpose(2, 3)),
        "transposed": lambda: torch.matmul(query, transposed),
    }
    first, second = (work() for work in works.values())
    assert torch.allclose(first, second, atol=1e-4), "the layout changed the scores"
    return quickest(works, rounds)


def copy_seconds(heads: HeadShape, shape: CaseShape, layers: int, rounds: int) -> dict[str, float]:
    """All layers of a block, as copy-on-write and a move to another machine need them; per block."""
    blocks = 64
    first = torch.zeros(blocks, layers, 2, heads.kv_heads, shape.block_size, heads.head_dim)
    by_layer = torch.zeros(layers, 2, blocks, heads.kv_heads, shape.block_size, heads.head_dim)
    half = blocks // 2

    def block_first() -> None:
        for block in range(half):
            first[half + block].copy_(first[block])

    def layer_first() -> None:
        for block in range(half):
            by_layer[:, :, half + block].copy_(by_layer[:, :, block])

    found = quickest({"block_first": block_first, "layer_first": layer_first}, rounds)
    return {name: seconds / half for name, seconds in found.items()}
