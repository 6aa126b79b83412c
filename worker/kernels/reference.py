"""Reference attention: online softmax in plain torch, the oracle for every other backend.

Owns: the readable form of paged attention: write KV by slot, then walk the block tables in tiles of 256 positions.
Does not: chase speed, beyond computing pieces with the same number of query rows together.
Invariants: fp32, fixed tiles of positions, equal inner sizes, 16n rows: batch, piece and query count change no bits.
"""

from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad

from worker.kernels.base import AttentionMetadata, SequenceSpan

TILE, QUERY_TILE, ROW_MULTIPLE = 256, 128, 16
LOWEST = -1e30  # finite, so that a tile in which a row sees nothing is an exact no-op


class ReferenceAttention:
    name = "reference"
    layout = "block,layer,kv,head,slot,dim"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer_kv: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        slots, block_size = metadata.slot_mapping, layer_kv.shape[3]
        layer_kv[slots // block_size, :, :, slots % block_size] = torch.stack((key, value), dim=1)
        output, window = torch.empty_like(query), sliding_window or 1 << 40
        cuts = [(s, i, min(QUERY_TILE, s.count - i)) for s in metadata.spans for i in range(0, s.count, QUERY_TILE)]
        pieces = [SequenceSpan(s.row + i, count, s.start + i, s.block_table) for s, i, count in cuts]
        pieces.sort(key=lambda p: (p.count, -p.end))
        for count, same in groupby(pieces, key=lambda p: p.count):
            spans = list(same)  # one batch, the longest context first
            rows = torch.tensor([[s.row + i for i in range(count)] for s in spans], device=query.device)  # [B, C]
            q = query[rows].float().view(len(spans), count, key.shape[1], -1, key.shape[2]) * scale
            result = _attend(q.transpose(1, 2), layer_kv, spans, window, softcap).transpose(1, 2)
            output[rows] = result.flatten(2, 3).to(query.dtype)  # [B, C, H, D]
        return output


def _attend(q: Tensor, layer_kv: Tensor, spans: list[SequenceSpan], window: int, softcap: float | None) -> Tensor:
    shape, q = q.shape, q.flatten(2, 3)  # [B, Hkv, C, group, D] -> [B, Hkv, M = C * group, D], then M is padded
    q = pad(q, (0, 0, 0, -q.shape[2] % ROW_MULTIPLE))
    offset = torch.arange(q.shape[2], device=q.device) // shape[3]
    position = torch.tensor([s.start for s in spans], device=q.device)[:, None, None, None] + offset[:, None]
    top, total, result = q.new_full((*q.shape[:3], 1), LOWEST), q.new_zeros((*q.shape[:3], 1)), torch.zeros_like(q)
    first = max(0, min(s.start for s in spans) - window + 1) // TILE * TILE
    for tile in range(first, spans[0].end, TILE):
        n = sum(s.end > tile for s in spans)  # the spans that reach this tile come first
        k, v = _gather(layer_kv, spans[:n], tile)
        scores = q[:n] @ k.transpose(2, 3)  # [n, Hkv, M, TILE]
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        at, here = torch.arange(tile, tile + TILE, device=q.device), position[:n]
        scores.masked_fill_((at > here) | (at <= here - window), float("-inf"))
        new_top = torch.maximum(top[:n], scores.amax(-1, keepdim=True))
        weights, fade = scores.sub_(new_top).exp_(), torch.exp(top[:n] - new_top)
        total[:n] = total[:n] * fade + weights.sum(-1, keepdim=True)
        result[:n], top[:n] = result[:n] * fade + weights @ v, new_top
    return (result / total)[:, :, : shape[2] * shape[3]].reshape(shape)


def _gather(layer_kv: Tensor, spans: list[SequenceSpan], tile: int) -> Tensor:
    """K and V of positions [tile, tile + TILE) as [2, n, Hkv, TILE, D] fp32, zero where a sequence has ended."""
    size = layer_kv.shape[3]
    low, high = tile // size, -(-(tile + TILE) // size)
    tables = torch.stack([pad(t := s.block_table[low:high], (0, high - low - len(t))) for s in spans])
    blocks = layer_kv.index_select(0, tables.flatten()).view(*tables.shape, *layer_kv.shape[1:])
    kv = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).narrow(3, tile - low * size, TILE).float()
    left = torch.tensor([s.end - tile for s in spans], device=kv.device)  # a gathered tile is ours to overwrite
    return kv.masked_fill_(torch.arange(TILE, device=kv.device)[:, None] >= left[:, None, None, None], 0.0)
