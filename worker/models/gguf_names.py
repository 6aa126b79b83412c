"""What a GGUF file calls the tensors of a decoder, and how it stores the rotary pairs of a head.

GGUF keeps the pairs of Llama-like models in adjacent rows of a head; Hugging Face keeps all first members, then all
second members.

Owns: the names and the question which tensors have their rows reordered.
Does not: read files or reorder rows (worker.models.checkpoint).
Invariants: a tensor whose meaning is not known is refused; one that only repeats config.json is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.core.errors import ConfigError

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED_PARTS = {**_LAYER_PARTS, "ffn_up": "mlp.gate_up_proj"}
_PARTS = {"llama": _LAYER_PARTS, "qwen2": _LAYER_PARTS, "qwen3": _LAYER_PARTS, "phi3": _FUSED_PARTS}
_REPEAT_CONFIG = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")  # config.json's rotary fields decide


class GgufNames:
    """The names of one file, whose metadata says the architecture."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._architecture = metadata.get("general.architecture")
        if self._architecture not in _PARTS:
            known = ", ".join(_PARTS)
            raise ConfigError(f"its architecture is {self._architecture!r}, and GGUF is loaded for {known}")
        self._metadata = metadata

    def hugging_face(self, name: str) -> str | None:
        """The Hugging Face name; None for a tensor that is not needed; ConfigError for an unknown one."""
        if name in _TOP:
            return _TOP[name]
        if name.startswith(_REPEAT_CONFIG):
            return None
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in _PARTS[str(self._architecture)]:
            _, layer, part, leaf = parts
            return f"model.layers.{layer}.{_PARTS[str(self._architecture)][part]}.{leaf}"
        raise ConfigError(f"the purpose of tensor {name} is not known")

    def interleaved_heads(self, name: str) -> int | None:
        """How many heads of adjacent pairs the rows of this tensor are; None if the rows are in order."""
        if self._architecture != "llama" or not name.startswith("blk."):
            return None
        keys = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
        key = keys.get(name.split(".")[2])
        if key is None:
            return None
        heads = self._metadata.get(key, self._metadata.get("llama.attention.head_count"))
        if not isinstance(heads, int) or heads <= 0:
            raise ConfigError(f"its metadata has no {key}")
        return heads
