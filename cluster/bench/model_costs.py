"""ModelCosts: the bytes and operations that a decoder model cannot do without, from its config.json.

Owns: the arithmetic of floors: how fast decoding and prefill could be at most, given the machine's limits.
Does not: measure those limits (machine_probe), or count norms, rotations and sampling, which are small beside them.
Invariants: pure; only for decoders of plain attention and a gated MLP; None for a config that is not one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """layer_weights, head_weights: numbers in the matrices that a token passes.  attention_width: heads * head size."""

    dtype: str
    layers: int
    layer_weights: int
    head_weights: int
    attention_width: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelCosts | None:
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            mlp, layers, vocabulary = (
                int(config[name]) for name in ("intermediate_size", "num_hidden_layers", "vocab_size")
            )
        except (KeyError, TypeError, ValueError):
            return None
        if any(config.get(name) for name in _EXPERTS):
            return None
        head_size = int(config.get("head_dim") or hidden // heads)
        q_width, kv_width = heads * head_size, int(config.get("num_key_value_heads") or heads) * head_size
        per_layer = hidden * (2 * q_width + 2 * kv_width) + 3 * hidden * mlp
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        return cls(
            dtype=dtype if dtype in _ELEMENT_BYTES else "float32",
            layers=layers,
            layer_weights=layers * per_layer,
            head_weights=hidden * vocabulary,
            attention_width=q_width,
        )

    @property
    def packed_bytes(self) -> int:
        """What every decode step reads: all matrices once, the output head included."""
        return (self.layer_weights + self.head_weights) * _ELEMENT_BYTES[self.dtype]

    def prefill_flops(self, tokens: int) -> int:
        """Of a prompt without any cached part: layers for every token, causal attention, the head once."""
        positions = tokens * (tokens + 1) // 2
        attention = 4 * self.attention_width * self.layers * positions
        return 2 * self.layer_weights * tokens + attention + 2 * self.head_weights

    def decode_floor_tps(self, bandwidth: float) -> float:
        """Tokens per second of one stream when reading the weights is all there is. `bandwidth`: bytes per second."""
        return bandwidth / self.packed_bytes

    def prefill_floor_s(self, tokens: int, gemm_rate: float) -> float:
        """Seconds when multiplying is all there is. `gemm_rate`: operations per second."""
        return self.prefill_flops(tokens) / gemm_rate
