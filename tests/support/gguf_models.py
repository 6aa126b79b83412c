"""Writes the GGUF file of a tiny model from its safetensors, in the layout that llama.cpp's converter gives it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
Array = np.ndarray[Any, Any]


def gguf_name(name: str) -> str:
    stem, leaf = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{leaf}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{leaf}"


def interleave(rows: Array, heads: int) -> Array:
    """First members, then second members of each head's rotary pairs, become adjacent."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(source: Path, target: Path, kind: gguf.GGMLQuantizationType, architecture: str) -> Path:
    """A directory with config.json and model.gguf; matrices are of type `kind`, vectors and odd sizes float32."""
    target.mkdir()
    shutil.copy(source / "config.json", target)
    config = json.loads((source / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(target / "model.gguf", architecture)
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "def"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5, 2.5])
    writer.add_tensor("rope_freqs.weight", np.ones(4, dtype=np.float32))
    for name, weight in load_file(source / "model.safetensors").items():
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            weight = interleave(weight, heads[part])
        weight = np.ascontiguousarray(weight)
        quantised = kind.name.startswith("Q")
        if weight.ndim == 1 or kind == gguf.GGMLQuantizationType.F32 or (quantised and weight.shape[1] % 32):
            writer.add_tensor(gguf_name(name), weight)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
