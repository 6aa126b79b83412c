"""The packed matrices of a checkpoint, and the checks before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from cluster.core.errors import ConfigError
from worker.models.checkpoint import open_checkpoint
from worker.models.decoder_spec import DecoderSpec
from worker.models.decoder_weights import DecoderWeights

ModelDir = Callable[[str], Path]
Tensors = dict[str, torch.Tensor]
UP = "model.layers.1.mlp.up_proj.weight"


def weights_of(path: Path) -> DecoderWeights:
    spec = DecoderSpec.from_config(json.loads((path / "config.json").read_text()))
    return DecoderWeights(spec, open_checkpoint(path))


def edited(source: Path, target: Path, edit: Callable[[Tensors], Any]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("family", tiny_models.LEAN_FAMILIES)
def test_shapes_follow_the_spec(family: str, tiny_model_dir: ModelDir) -> None:
    weights = weights_of(tiny_model_dir(family))
    s = weights.spec
    rows = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
    inner, hidden = s.intermediate_size, s.hidden_size
    layers = list(weights.layers())
    assert len(layers) == s.num_layers
    for layer in layers:
        assert layer.qkv.shape == (rows, hidden) and layer.gate_up.shape == (2 * inner, hidden)
        assert layer.out.shape == (hidden, s.num_heads * s.head_dim) and layer.down.shape == (hidden, inner)
        assert layer.attn_norm.shape == layer.mlp_norm.shape == (hidden,)
        assert (layer.qkv_bias is not None, layer.out_bias is not None) == (s.qkv_bias, s.out_bias)
        assert (layer.gate_up_bias is not None, layer.down_bias is not None) == (s.mlp_bias, s.mlp_bias)
        assert (layer.q_norm is not None, layer.k_norm is not None) == (s.qk_norm, s.qk_norm)
        if layer.qkv_bias is not None:
            assert layer.qkv_bias.shape == (rows,)
    assert weights.embedding.shape == weights.lm_head.shape == (s.vocab_size, hidden)
    assert (weights.lm_head is weights.embedding) == s.tie_embeddings
    stored = sum(tensor.numel() for tensor in load_file(tiny_model_dir(family) / "model.safetensors").values())
    assert weights.weight_bytes(2) == 2 * stored


def test_order_of_rows(tiny_model_dir: ModelDir) -> None:
    path = tiny_model_dir("qwen2-bias")
    stored, layer = load_file(path / "model.safetensors"), list(weights_of(path).layers())[2]
    attention, mlp = "model.layers.2.self_attn.", "model.layers.2.mlp."
    assert torch.equal(layer.qkv, torch.cat([stored[f"{attention}{part}_proj.weight"] for part in "qkv"]))
    assert layer.qkv_bias is not None
    assert torch.equal(layer.qkv_bias, torch.cat([stored[f"{attention}{part}_proj.bias"] for part in "qkv"]))
    assert torch.equal(layer.gate_up, torch.cat([stored[f"{mlp}gate_proj.weight"], stored[f"{mlp}up_proj.weight"]]))


def test_stored_output_matrix_of_a_tied_model(tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    source = tiny_model_dir("llama-tied")
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    same = weights_of(edited(source, tmp_path / "same", lambda t: t.update({"lm_head.weight": embedding.clone()})))
    assert same.lm_head is same.embedding
    assert same.weight_bytes(4) == weights_of(source).weight_bytes(4)
    other = weights_of(edited(source, tmp_path / "other", lambda t: t.update({"lm_head.weight": embedding + 1})))
    assert torch.equal(other.lm_head, embedding + 1)
    assert other.weight_bytes(4) == same.weight_bytes(4) + embedding.nbytes
    only = weights_of(
        edited(source, tmp_path / "only", lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    )
    assert only.lm_head is only.embedding and torch.equal(only.embedding, embedding)


def test_frequencies_of_old_checkpoints_are_left_out(tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    path = edited(tiny_model_dir("llama-tied"), tmp_path / "m", lambda t: t.update({name: torch.ones(4)}))
    assert weights_of(path).weight_bytes(1) == weights_of(tiny_model_dir("llama-tied")).weight_bytes(1)


WRONG: list[tuple[str, Callable[[Tensors], Any], str]] = [
    ("llama-tied", lambda t: t.pop(UP), rf"has no tensor {UP}"),
    ("llama-untied", lambda t: t.pop("lm_head.weight"), r"has no tensor lm_head.weight"),
    ("qwen2-bias", lambda t: t.pop("model.layers.0.self_attn.k_proj.bias"), r"has no tensor .*k_proj.bias"),
    ("qwen3-norms", lambda t: t.pop("model.layers.2.self_attn.q_norm.weight"), r"has no tensor .*q_norm.weight"),
    (
        "llama-tied",
        lambda t: t.update({UP: torch.zeros(47, 32)}),
        rf"model.safetensors: tensor {UP} has shape \(47, 32\), config.json says \(48, 32\)",
    ),
    (
        "llama-tied",
        lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(48, 32)}),
        r"tensor model.layers.3.mlp.up_proj.weight has no place in a llama model of 3 layers",
    ),
    (
        "mistral-window",
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(320)}),
        r"q_proj.bias has no place in a mistral model",
    ),
]


@pytest.mark.parametrize(("family", "edit", "message"), WRONG, ids=[case[2] for case in WRONG])
def test_wrong_checkpoints(
    family: str, edit: Callable[[Tensors], Any], message: str, tiny_model_dir: ModelDir, tmp_path: Path
) -> None:
    path = edited(tiny_model_dir(family), tmp_path / "m", edit)
    with pytest.raises(ConfigError, match=message):
        weights_of(path)
