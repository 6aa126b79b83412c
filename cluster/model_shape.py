"""ModelShape: the sizes of a decoder as its config.json states them, and its parameter count by formula.

    embedding        vocab x hidden, and once more for the output unless the two are tied
    attention        hidden x (heads + 2 x KV heads) x head dim, and heads x head dim x hidden on the way out
    MLP              3 x hidden x intermediate (gate, up, down)
    norms, biases    small change, by family

Owns: the fields and the defaults that transformers gives them, what they refuse, and the formula for some families.
Does not: read files, import transformers, or promise that a model runs: worker.models.compatibility decides at load.
Invariants: every size is at least 1 and heads are a multiple of KV heads; a family without a formula has no parameter
count, because a guess would look like a fact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cluster.core.errors import ConfigError

_MOST = 10**12  # beyond any model, and products of such sizes still fit into a float
_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """How a family differs from the formula's plain form, and its defaults for fields that config.json may leave out.

    bias_fields: those of attention_bias and mlp_bias that count. mha: no num_key_value_heads means all heads keep KV.
    """

    norms_per_layer: int = 2
    qk_norm: bool = False
    qkv_bias: bool = False
    bias_fields: frozenset[str] = frozenset()
    tied: bool = False
    head_dim: int | None = None
    mha: bool = False


_ATTENTION_BIAS = frozenset({"attention_bias"})
_FAMILIES = {
    "llama": _Family(bias_fields=frozenset({"attention_bias", "mlp_bias"}), mha=True),
    "mistral": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True, bias_fields=_ATTENTION_BIAS, head_dim=128),
    "phi3": _Family(mha=True),
    "gemma": _Family(bias_fields=_ATTENTION_BIAS, tied=True, head_dim=256),
    "gemma2": _Family(norms_per_layer=4, bias_fields=_ATTENTION_BIAS, tied=True, head_dim=256),
    "gemma3_text": _Family(norms_per_layer=4, qk_norm=True, bias_fields=_ATTENTION_BIAS, tied=True, head_dim=256),
}
FAMILIES = tuple(_FAMILIES)
_UNKNOWN = _Family()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """`parameters` is None when the family has no formula; `dtype` is the stored one, None when none is named."""

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    model_limit: int
    dtype: str | None
    parameters: int | None


def read_shape(config: object) -> ModelShape:
    """The shape in a parsed config.json. ConfigError names the field that is missing, wrong or cannot be served."""
    if not isinstance(config, Mapping):
        raise ConfigError("config.json is not a JSON object")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError("config.json has no model_type")
    _refuse(config)
    family = _FAMILIES.get(model_type, _UNKNOWN)
    heads = _whole(config, "num_attention_heads")
    shape = ModelShape(
        model_type=model_type,
        num_layers=_whole(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_kv_heads(config, family, heads),
        head_dim=_head_dim(config, family, heads),
        model_limit=_model_limit(config, model_type),
        dtype=_dtype(config),
        parameters=None,
    )
    if model_type not in _FAMILIES:
        return shape
    return replace(shape, parameters=_parameters(config, family, shape))


def _refuse(config: Mapping[str, Any]) -> None:
    """What can be told from the fields, in the words of worker.models.compatibility."""
    if config.get("is_encoder_decoder"):
        raise ConfigError("it is an encoder-decoder model")
    if config.get("quantization_config") is not None:
        raise ConfigError("quantised checkpoints are not supported")
    if config.get("num_kv_shared_layers"):
        raise ConfigError("its layers share KV across layers")
    if config.get("kv_lora_rank"):
        raise ConfigError("it keeps compressed KV (kv_lora_rank), which the formula here does not cover")
    layer_types = config.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list):
        raise ConfigError(f"config.json: layer_types is {_shown(layer_types)}, not a list")
    others = sorted({str(kind) for kind in layer_types or ()} - _PLAIN_LAYERS)
    if others:
        raise ConfigError(
            f"it has layers of type {_shown(', '.join(others))}; only full and sliding-window attention run"
        )


def _kv_heads(config: Mapping[str, Any], family: _Family, heads: int) -> int:
    absent_means_all = family.mha or "num_key_value_heads" in config
    kv_heads = _whole(config, "num_key_value_heads", heads if absent_means_all else None)
    if heads % kv_heads:
        raise ConfigError(f"config.json: {heads} attention heads are not a multiple of {kv_heads} KV heads")
    return kv_heads


def _head_dim(config: Mapping[str, Any], family: _Family, heads: int) -> int:
    if config.get("head_dim") is not None or family.head_dim is not None:
        return _whole(config, "head_dim", family.head_dim)
    hidden = _whole(config, "hidden_size")
    if hidden % heads:
        raise ConfigError(
            f"config.json: hidden_size {hidden} is not a multiple of {heads} heads, and head_dim is missing"
        )
    return hidden // heads


def _model_limit(config: Mapping[str, Any], model_type: str) -> int:
    """Like worker.models.compatibility.length_limit, which says why two kinds of rotary embedding end earlier."""
    limit = _whole(config, "max_position_embeddings")
    outside = _whole(config, "original_max_position_embeddings", 4096 if model_type == "phi3" else limit)
    for rope in _ropes(config):
        kind = rope.get("rope_type") or rope.get("type")
        if kind == "longrope" or (model_type == "phi3" and kind in ("su", "yarn")):
            inside = _whole(rope, "original_max_position_embeddings", outside)
            outside_counts = model_type == "phi3" or config.get("original_max_position_embeddings") is not None
            limit = min(limit, outside if outside_counts else inside)
        elif kind == "dynamic":
            limit = min(limit, _whole(rope, "original_max_position_embeddings", outside))
    return limit


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rotary parameters; some models nest one set per layer type."""
    ropes = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(ropes, Mapping):
        yield ropes
        yield from (rope for rope in ropes.values() if isinstance(rope, Mapping))


def _dtype(config: Mapping[str, Any]) -> str | None:
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype is not None and not isinstance(dtype, str):
        raise ConfigError(f"config.json: dtype is {_shown(dtype)}, not a name")
    return dtype.removeprefix("torch.") if dtype else None


def _parameters(config: Mapping[str, Any], family: _Family, shape: ModelShape) -> int:
    hidden, intermediate, vocab = (_whole(config, name) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention_bias, mlp_bias = (
        name in family.bias_fields and _flag(config, name) for name in ("attention_bias", "mlp_bias")
    )
    layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * intermediate
    layer += family.norms_per_layer * hidden
    layer += 2 * shape.head_dim * family.qk_norm
    layer += (q + 2 * kv) * (family.qkv_bias or attention_bias) + hidden * attention_bias
    layer += (2 * intermediate + hidden) * mlp_bias
    tables = 1 if _flag(config, "tie_word_embeddings", family.tied) else 2
    return tables * vocab * hidden + shape.num_layers * layer + hidden


def _whole(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json has no {name}")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise ConfigError(f"config.json: {name} is {_shown(value)}, not a whole number from 1 to 10^12")
    return value


def _flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {name} is {_shown(value)}, not true or false")
    return value


def _shown(value: object) -> str:
    """On one line and short: it comes from a file that may hold anything."""
    return f"{value!r:.60}"
