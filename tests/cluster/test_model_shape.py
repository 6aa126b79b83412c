"""What config.json says: parameter counts of published models, defaults, limits, and one clear line per refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import ConfigError
from cluster.memory_plan import kv_bytes_per_token
from cluster.model_shape import FAMILIES, ModelShape, read_shape
from worker.models.fingerprint import checkpoint_bytes


def config(model_type: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """`sizes`: hidden, intermediate, layers, heads, KV heads, vocabulary, positions."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
    )
    return {"model_type": model_type, **dict(zip(names, sizes, strict=True)), **more}


LLAMA_3_8B = config("llama", (4096, 14336, 32, 32, 8, 128256, 8192), torch_dtype="bfloat16", tie_word_embeddings=False)
LLAMA_2_7B = config("llama", (4096, 11008, 32, 32, 32, 32000, 4096), torch_dtype="float16", tie_word_embeddings=False)
MISTRAL_7B = config("mistral", (4096, 14336, 32, 32, 8, 32000, 32768), torch_dtype="bfloat16", sliding_window=4096)
QWEN_25_05B = config("qwen2", (896, 4864, 24, 14, 2, 151936, 32768), torch_dtype="bfloat16", tie_word_embeddings=True)
QWEN_3_06B = config(
    "qwen3",
    (1024, 3072, 28, 16, 8, 151936, 40960),
    head_dim=128,
    attention_bias=False,
    torch_dtype="bfloat16",
    tie_word_embeddings=True,
)
PHI_3_MINI = config("phi3", (3072, 8192, 32, 32, 32, 32064, 4096), torch_dtype="bfloat16", tie_word_embeddings=False)
SMOLLM2_135M = config("llama", (576, 1536, 30, 9, 3, 49152, 8192), torch_dtype="bfloat16", tie_word_embeddings=True)
GEMMA_2_2B = config("gemma2", (2304, 9216, 26, 8, 4, 256000, 8192), head_dim=256, torch_dtype="float32")

# published parameter counts; KV bytes per token are 2 x layers x KV heads x head dim x 2 bytes, by hand
KNOWN = {
    "Llama-3-8B": (LLAMA_3_8B, 8_030_261_248, 131_072),
    "Llama-2-7B": (LLAMA_2_7B, 6_738_415_616, 524_288),
    "Mistral-7B-v0.1": (MISTRAL_7B, 7_241_732_096, 131_072),
    "Qwen2.5-0.5B": (QWEN_25_05B, 494_032_768, 12_288),
    "Qwen3-0.6B": (QWEN_3_06B, 596_049_920, 114_688),
    "Phi-3-mini-4k": (PHI_3_MINI, 3_821_079_552, 393_216),
    "SmolLM2-135M": (SMOLLM2_135M, 134_515_008, 23_040),
    "Gemma-2-2B": (GEMMA_2_2B, 2_614_341_888, 106_496),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_models(name: str) -> None:
    values, parameters, kv_bytes = KNOWN[name]
    shape = read_shape(values)
    assert shape.parameters == parameters
    assert kv_bytes_per_token(shape, 2) == kv_bytes
    assert kv_bytes_per_token(shape, 4) == 2 * kv_bytes


def test_llama_3_8b_term_by_term() -> None:
    attention = 4096 * 4096 * 2 + 4096 * 1024 * 2  # q and o, k and v
    layer = attention + 3 * 4096 * 14336 + 2 * 4096
    assert read_shape(LLAMA_3_8B).parameters == 2 * 128256 * 4096 + 32 * layer + 4096


def test_fields_of_the_shape() -> None:
    assert read_shape(QWEN_3_06B) == ModelShape(
        model_type="qwen3",
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        model_limit=40960,
        dtype="bfloat16",
        parameters=596_049_920,
    )


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def test_fields_that_a_config_may_leave_out() -> None:
    assert read_shape(without(LLAMA_2_7B, "num_key_value_heads", "tie_word_embeddings")) == read_shape(LLAMA_2_7B)
    assert read_shape({**LLAMA_2_7B, "num_key_value_heads": None, "head_dim": None}) == read_shape(LLAMA_2_7B)
    assert read_shape(without(QWEN_3_06B, "head_dim")) == read_shape(QWEN_3_06B)
    assert read_shape(without(GEMMA_2_2B, "head_dim")) == read_shape(GEMMA_2_2B)
    assert read_shape(without(LLAMA_3_8B, "torch_dtype")).dtype is None
    assert read_shape({**LLAMA_3_8B, "dtype": "torch.float16"}).dtype == "float16"


def test_biases_count_where_the_family_has_them() -> None:
    plain = read_shape(SMOLLM2_135M).parameters
    assert plain is not None
    q, kv, hidden, intermediate = 576, 192, 576, 1536
    biased = read_shape({**SMOLLM2_135M, "attention_bias": True, "mlp_bias": True}).parameters
    assert biased == plain + 30 * (q + 2 * kv + hidden + 2 * intermediate + hidden)
    assert read_shape({**MISTRAL_7B, "attention_bias": True}).parameters == 7_241_732_096


def test_a_family_without_a_formula_has_no_count() -> None:
    shape = read_shape(without({**MISTRAL_7B, "model_type": "olmo9"}, "vocab_size", "intermediate_size"))
    assert shape.parameters is None
    assert kv_bytes_per_token(shape, 2) == 131_072


PHI_3_128K = {
    **PHI_3_MINI,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LIMITS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": (LLAMA_3_8B, 8192),
    "longrope": (PHI_3_128K, 4096),
    "dynamic": ({**LLAMA_2_7B, "rope_scaling": {**DYNAMIC, "original_max_position_embeddings": 2048}}, 2048),
    "dynamic without a length": ({**LLAMA_2_7B, "rope_scaling": DYNAMIC}, 4096),
    "linear": ({**LLAMA_2_7B, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 4096),
    "new field": ({**LLAMA_2_7B, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 4096),
}


@pytest.mark.parametrize("name", LIMITS)
def test_longest_length(name: str) -> None:
    values, limit = LIMITS[name]
    assert read_shape(values).model_limit == limit


def test_longest_length_under_the_old_name_of_longrope() -> None:
    """Not among LIMITS: transformers 5.24 itself refuses such a file."""
    assert read_shape({**PHI_3_128K, "rope_scaling": {**PHI_3_128K["rope_scaling"], "type": "su"}}).model_limit == 4096


WRONG: dict[str, tuple[object, str]] = {
    "a list": ([], "not a JSON object"),
    "empty": ({}, "no model_type"),
    "model_type": ({**LLAMA_3_8B, "model_type": 3}, "no model_type"),
    "missing": (without(LLAMA_3_8B, "num_hidden_layers"), "no num_hidden_layers"),
    "other names": ({"model_type": "gpt2", "n_layer": 12, "n_head": 12}, "no num_attention_heads"),
    "missing KV heads": (without(MISTRAL_7B, "num_key_value_heads"), "no num_key_value_heads"),
    "zero": ({**LLAMA_3_8B, "num_attention_heads": 0}, "num_attention_heads is 0"),
    "negative": ({**LLAMA_3_8B, "vocab_size": -1}, "vocab_size is -1"),
    "float": ({**LLAMA_3_8B, "hidden_size": 1.5}, "hidden_size is 1.5"),
    "bool": ({**LLAMA_3_8B, "num_hidden_layers": True}, "num_hidden_layers is True"),
    "huge": ({**LLAMA_3_8B, "num_hidden_layers": 10**300}, "num_hidden_layers is 1000"),
    "list": ({**LLAMA_3_8B, "intermediate_size": [1] * 99}, "intermediate_size is"),
    "flag": ({**LLAMA_3_8B, "tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    "dtype": ({**LLAMA_3_8B, "dtype": 16}, "dtype is 16"),
    "heads": ({**LLAMA_3_8B, "num_key_value_heads": 5}, "not a multiple of 5 KV heads"),
    "hidden": ({**LLAMA_3_8B, "hidden_size": 4097}, "head_dim is missing"),
    "layer types": ({**LLAMA_3_8B, "layer_types": 3}, "layer_types is 3"),
    "linear attention": ({**LLAMA_3_8B, "layer_types": ["linear_attention"]}, "layers of type 'linear_attention'"),
    "odd layer types": ({**LLAMA_3_8B, "layer_types": [{"a": 1}, None]}, "layers of type"),
    "quantised": ({**LLAMA_3_8B, "quantization_config": {"bits": 4}}, "quantised"),
    "encoder": ({**LLAMA_3_8B, "is_encoder_decoder": True}, "encoder-decoder"),
    "shared KV": ({**LLAMA_3_8B, "num_kv_shared_layers": 2}, "share KV"),
    "compressed KV": ({**LLAMA_3_8B, "kv_lora_rank": 512}, "kv_lora_rank"),
    "rope": ({**LLAMA_3_8B, "rope_scaling": {**DYNAMIC, "original_max_position_embeddings": "x"}}, "is 'x'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_config_is_one_line(name: str) -> None:
    values, words = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        read_shape(values)
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 200


@pytest.mark.torch
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3"])
def test_the_formula_counts_what_transformers_saves(family: str, tiny_model_dir: Callable[[str], Path]) -> None:
    assert family in FAMILIES
    path = tiny_model_dir(family)
    assert read_shape(json.loads((path / "config.json").read_text())).parameters == checkpoint_bytes(path, 1)


@pytest.mark.torch
@pytest.mark.parametrize("name", LIMITS)
def test_the_longest_length_is_the_one_that_serving_allows(name: str, tmp_path: Path) -> None:
    from worker.models.compatibility import length_limit, read_config

    values, limit = LIMITS[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert length_limit(read_config(tmp_path)) == limit
