"""Reading config.json: what is honoured, what is refused, and the defaults that transformers has."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import transformers

from cluster.core.errors import ConfigError
from worker.models import compatibility
from worker.models.decoder_spec import DecoderSpec, canonical_rope, why_not_lean

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
CLASSES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "phi3": transformers.Phi3Config,
}


def config(kind: str, **changes: Any) -> dict[str, Any]:
    return {**SIZES, "model_type": kind, **changes}


@pytest.mark.parametrize("kind", CLASSES)
def test_left_out_fields_have_the_defaults_of_transformers(kind: str) -> None:
    heads = {"num_attention_heads": 32, "hidden_size": 256}
    theirs, ours = CLASSES[kind](**{**SIZES, **heads}), DecoderSpec.from_config(config(kind, **heads))
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.rms_eps == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.windows == (getattr(theirs, "sliding_window", None),) * 3
    assert ours.model_limit == compatibility.length_limit(theirs)


ROPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_theta": 5e5}),
    ("llama", {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "original_max_position_embeddings": 16}),
    ("llama", {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}, "rope_theta": 9.0}),
    ("qwen2", {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    ("phi3", {}),
    ("phi3", {"partial_rotary_factor": 0.5}),
    ("phi3", {"rope_scaling": {"type": "longrope", **LONGROPE}}),
    ("phi3", {"rope_scaling": {"type": "longrope", **LONGROPE}, "original_max_position_embeddings": 128}),
    ("phi3", {"rope_scaling": {"type": "su", "original_max_position_embeddings": 128, **LONGROPE}}),
]


@pytest.mark.parametrize(("kind", "changes"), ROPES)
def test_rotary_parameters_and_limit_equal_transformers(kind: str, changes: dict[str, Any]) -> None:
    ours = config(kind, max_position_embeddings=256, num_key_value_heads=4, **changes)
    theirs = transformers.AutoConfig.for_model(**{**ours, "pad_token_id": 0})
    theirs.standardize_rope_params()
    assert canonical_rope(ours) == theirs.rope_parameters
    assert DecoderSpec.from_config(ours).model_limit == compatibility.length_limit(theirs)


def test_first_phi3_checkpoints_which_transformers_no_longer_reads() -> None:
    old = config("phi3", rope_scaling={"type": "su", **LONGROPE}, original_max_position_embeddings=128)
    new = config("phi3", rope_scaling={"type": "longrope", **LONGROPE}, original_max_position_embeddings=128)
    assert DecoderSpec.from_config(old).rope == DecoderSpec.from_config(new).rope


@pytest.mark.parametrize(
    ("kind", "changes", "windows"),
    [
        ("llama", {}, (None, None, None)),
        ("mistral", {"sliding_window": 7}, (7, 7, 7)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("phi3", {"sliding_window": 7}, (7, 7, 7)),
        ("qwen2", {"sliding_window": 7}, (None, None, None)),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, (None, 7, 7)),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 9}, (None, None, None)),
        ("qwen3", {"sliding_window": 7, "use_sliding_window": True, "layer_types": LAYERS}, (7, None, 7)),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, (None, None, None)),
    ],
)
def test_windows(kind: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert DecoderSpec.from_config(config(kind, num_key_value_heads=4, **changes)).windows == windows


@pytest.mark.parametrize(
    ("kind", "changes", "flags"),
    [
        ("llama", {}, (False, False, False, False, False)),
        ("llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False, False)),
        ("qwen2", {}, (True, False, False, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False, True, False)),
        ("phi3", {}, (False, False, False, False, True)),
    ],
)
def test_flags(kind: str, changes: dict[str, Any], flags: tuple[bool, ...]) -> None:
    spec = DecoderSpec.from_config(config(kind, num_key_value_heads=2, **changes))
    assert (spec.qkv_bias, spec.out_bias, spec.mlp_bias, spec.qk_norm, spec.fused_checkpoint) == flags


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma2", {}, "model_type 'gemma2' is none of llama"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "it sets quantization_config"),
    ("llama", {"final_logit_softcapping": 30.0}, "it sets final_logit_softcapping"),
    ("llama", {"num_local_experts": 8}, "it sets num_local_experts"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "no causal language model"),
    ("llama", {"is_causal": False}, "not causal"),
    ("llama", {"sliding_window": 5}, "a llama model has no sliding_window"),
    ("llama", {"layer_types": LAYERS}, "a llama model has no layer_types"),
    ("llama", {"partial_rotary_factor": 0.5}, "a llama model has no partial_rotary_factor"),
    ("llama", {"rope_scaling": {"type": "new"}}, "unknown type 'new'"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "'full_attention' is not known"),
    ("llama", {"hidden_size": None}, "hidden_size is not a positive whole number: None"),
    ("llama", {"vocab_size": "96"}, "vocab_size is not a positive whole number: '96'"),
    ("llama", {"num_key_value_heads": 3}, "4 attention heads do not share 3 KV heads evenly"),
    ("llama", {"head_dim": 15}, "would turn 15 of 15"),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps is not a small number"),
    ("mistral", {"attention_bias": True}, "a mistral model has no attention_bias"),
    ("mistral", {"sliding_window": 0}, "sliding_window is not a positive whole number: 0"),
    ("qwen2", {"mlp_bias": True}, "a qwen2 model has no mlp_bias"),
    ("qwen2", {"layer_types": LAYERS}, "there is no sliding window"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types names 1 of 3 layers"),
    ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layers of type linear_attention"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "no rotary embedding of type 'linear'"),
]


@pytest.mark.parametrize(("kind", "changes", "reason"), REFUSED, ids=[case[2] for case in REFUSED])
def test_refusals(kind: str, changes: dict[str, Any], reason: str) -> None:
    refused = {**config(kind, num_key_value_heads=4), **changes}
    assert reason in (why_not_lean(refused) or "")
    with pytest.raises(ConfigError):
        DecoderSpec.from_config(refused)


@pytest.mark.parametrize("family", tiny_models.LEAN_FAMILIES)
def test_every_lean_family_is_lean(family: str) -> None:
    config_class, changes = tiny_models.LEAN_FAMILIES[family]
    theirs = getattr(transformers, config_class)(**{**tiny_models.BASE, **changes})
    assert why_not_lean(theirs.to_dict()) is None
