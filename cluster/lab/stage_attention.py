"""The two stages before blocks, as attention steps of the torch decoder: nothing kept, and one tensor per request.

Owns: WholeHistory and ContiguousCache.
Does not: page (worker.models.attention_hook.PagedStep does) or choose tokens (stages).
Invariants: plain causal attention over positions in order; a window is honoured.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from worker.kvcache.kv_pool import KvGeometry
from worker.models.attention_hook import LayerCall


class WholeHistory:
    """The rows are the whole sequence, and nothing is kept."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        return _causal(call, call.key, call.value)


class ContiguousCache:
    """(layers, 2, KV heads, longest, head dim), reserved at the start. Rows continue at `length`."""

    def __init__(self, geometry: KvGeometry, longest: int) -> None:
        g = geometry
        shape = (g.num_layers, 2, longest, g.num_kv_heads, g.head_dim)
        self.tensor = torch.zeros(shape, dtype=g.dtype)
        self.length = 0

    def attend(self, call: LayerCall) -> torch.Tensor:
        end = self.length + len(call.query)
        layer = self.tensor[call.layer]
        layer[0, self.length : end], layer[1, self.length : end] = call.key, call.value
        return _causal(call, layer[0, :end], layer[1, :end])


def _causal(call: LayerCall, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Row i of the queries is the position `len(keys) - len(queries) + i`."""
    at = torch.arange(len(keys))
    here = at[len(keys) - len(call.query) :, None]
    seen = at <= here
    if call.sliding_window is not None:
        seen &= at > here - call.sliding_window
    query, key, value = (rows.transpose(0, 1)[None] for rows in (call.query, keys, values))
    out = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=call.scale, enable_gqa=True)
    return out[0].transpose(0, 1)
