"""Which Hugging Face models can run on the paged pool, and why the others cannot.

Owns: reading config.json into transformers' config, the refusals that it allows before any weight is loaded, those that
need the attention calls of a probe run, and the longest length at which a model's rotary embedding is stable.
Does not: load weights.
Invariants: every refusal names the reason; a model without a reason runs correctly or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.core.errors import ConfigError
from worker.models.attention_hook import LayerCall
from worker.models.rope import stable_length

_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})
_UNKNOWN_LENGTH_TOKENS = 4096


def read_config(model_dir: Path) -> Any:
    """transformers' config of a model that can be served, or ConfigError with the reason."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read {model_dir}/config.json: {str(error).splitlines()[0]}") from error
    if config.is_encoder_decoder:
        reason: str | None = "it is an encoder-decoder model"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = f"transformers has no causal language model of type {config.model_type!r}"
    else:
        reason = _refuse_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]) or _refuse_config(config.get_text_config())
    if reason is not None:
        raise ConfigError(f"cannot serve {model_dir.name}: {reason}")
    return config


def _refuse_class(model_class: Any) -> str | None:
    if model_class._is_stateful:
        return f"{model_class.__name__} has recurrent state, which cannot live in KV blocks"
    if not model_class._supports_attention_backend:
        return f"{model_class.__name__} does not support transformers' attention interface"
    return None


def _refuse_config(config: Any) -> str | None:
    if getattr(config, "quantization_config", None) is not None:
        return "quantised checkpoints are not supported"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _PLAIN_LAYERS)
    if others:
        return f"it has layers of type {', '.join(others)}; only full and sliding-window attention run on KV blocks"
    if getattr(config, "num_kv_shared_layers", 0):
        return "its layers share KV across layers"
    v_head_dim = getattr(config, "v_head_dim", None)
    qk_head_dim = getattr(config, "qk_nope_head_dim", None)
    if v_head_dim and qk_head_dim and v_head_dim != qk_head_dim + config.qk_rope_head_dim:
        return f"K and V head dims differ ({qk_head_dim + config.qk_rope_head_dim} and {v_head_dim})"
    return None


def refuse_calls(calls: Sequence[LayerCall], config: Any) -> str | None:
    """What the attention calls of one probe run say against serving the model."""
    layers = [call.layer for call in calls]
    if layers != list(range(config.num_hidden_layers)):
        return (
            f"its {config.num_hidden_layers} layers make {len(layers)} attention calls; one each, in order, is needed"
        )
    if len({call.key.data_ptr() for call in calls}) < len(calls):
        return "its layers share KV across layers"
    for call in calls:
        if call.key.shape != call.value.shape:
            return f"K and V head dims differ ({call.key.shape[2]} and {call.value.shape[2]})"
    if len({(call.query.shape, call.key.shape) for call in calls}) > 1:
        return "its layers differ in heads or head dim"
    for call, kind in zip(calls, getattr(config, "layer_types", None) or (), strict=False):
        if kind == "sliding_attention" and call.sliding_window is None:
            return f"layer {call.layer} does not tell its sliding window to the attention interface"
    return None


def length_limit(config: Any) -> int:
    """The longest sequence in tokens; no longer than the model's rotary embedding is stable."""
    limit = int(getattr(config, "max_position_embeddings", None) or _UNKNOWN_LENGTH_TOKENS)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))):
        original = getattr(config, "original_max_position_embeddings", None) or limit
        limit = min(limit, stable_length(rope, original) or limit)
    return limit
