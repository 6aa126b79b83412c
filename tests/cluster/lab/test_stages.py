"""The stages before blocks: attention over a contiguous cache, and the count of rows."""

from __future__ import annotations

import pytest
import torch

from cluster.lab.stage_attention import ContiguousCache, WholeHistory
from worker.kvcache.kv_pool import KvGeometry
from worker.models.attention_hook import LayerCall

GEOMETRY = KvGeometry(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype=torch.float32)


def call(rows: slice, layer: int, window: int | None) -> LayerCall:
    generator = torch.Generator().manual_seed(layer)
    query, key, value = (torch.randn(12, heads, 8, generator=generator)[rows] for heads in (4, 2, 2))
    return LayerCall(layer=layer, query=query, key=key, value=value, scale=0.3, sliding_window=window, softcap=None)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("pieces", [[12], [5, 4, 3], [1] * 12])
def test_a_contiguous_cache_fed_in_pieces_attends_as_the_whole_history(pieces: list[int], window: int | None) -> None:
    cache = ContiguousCache(GEOMETRY, 20)
    parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for count in pieces:
        rows = slice(cache.length, cache.length + count)
        for layer in range(2):
            parts[layer].append(cache.attend(call(rows, layer, window)))
        cache.length += count
    for layer in range(2):
        whole = WholeHistory().attend(call(slice(0, 12), layer, window))
        torch.testing.assert_close(torch.cat(parts[layer]), whole)


def test_a_contiguous_cache_is_reserved_at_its_full_length() -> None:
    assert ContiguousCache(GEOMETRY, 20).tensor.nbytes == 20 * GEOMETRY.bytes_per_token


def test_attention_sees_no_later_position() -> None:
    early = WholeHistory().attend(call(slice(0, 6), 0, None))
    torch.testing.assert_close(early, WholeHistory().attend(call(slice(0, 12), 0, None))[:6])
