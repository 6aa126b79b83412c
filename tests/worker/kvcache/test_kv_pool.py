"""The pool tensor: layout, views, block copies, bytes."""

from __future__ import annotations

import torch

from worker.kvcache.kv_pool import KvGeometry, KvPool, kv_bytes_per_token

GEOMETRY = KvGeometry(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.bfloat16)


def make_pool(num_blocks: int = 5) -> KvPool:
    return KvPool(GEOMETRY, num_blocks, torch.device("cpu"))


def test_layout_and_account() -> None:
    pool = make_pool()
    assert pool.tensor.shape == (5, 3, 2, 2, 4, 8)
    assert GEOMETRY.bytes_per_token == kv_bytes_per_token(3, 2, 8, 2) == 3 * 2 * 2 * 8 * 2
    assert pool.num_bytes == pool.tensor.nbytes == 5 * GEOMETRY.bytes_per_block


def test_smollm2_bytes_per_token() -> None:
    assert kv_bytes_per_token(30, 3, 64, 2) == 23_040


def test_layer_is_a_view() -> None:
    pool = make_pool()
    pool.tensor.zero_()
    layer = pool.layer(1)
    assert layer.shape == (5, 2, 2, 4, 8)
    layer[3, 1, 0, 2] = 7.0
    assert torch.all(pool.tensor[3, 1, 1, 0, 2] == 7.0)
    assert pool.tensor.count_nonzero() == 8


def test_a_block_is_contiguous_and_copied_over_all_layers() -> None:
    pool = make_pool()
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    before = pool.tensor.clone()
    assert pool.tensor[2].is_contiguous()
    pool.copy_block(1, 4)
    assert torch.equal(pool.tensor[4], before[1])
    assert torch.equal(pool.tensor[:4], before[:4])
