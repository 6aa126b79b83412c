"""DecoderSpec: one description for the families of decoders that differ by flags only.

Llama 2 and 3, SmolLM2 and Mistral, Qwen2, Qwen2.5, Qwen3 and Phi-3 are the same computation up to biases, a norm on
queries and keys, attention windows and how the checkpoint packs its matrices.

Owns: reading the dict of config.json, the defaults of fields that it leaves out, and the reasons for refusing it.
Does not: look at weights, or know models outside these families (worker.models.transformers_backend runs those).
Invariants: a field that changes the numbers is honoured or refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.core.errors import ConfigError
from worker.models.rope import RopeSpec, rope_parameters

_SILU = ("silu", "swish")
# Fields of related architectures that change the result. None, False, 0 and [] switch each of them off.
_FOREIGN_FIELDS = (
    "attention_chunk_size",
    "attention_multiplier",
    "attn_logit_softcapping",
    "attn_output_gate",
    "clip_qkv",
    "compression_config",
    "embedding_multiplier",
    "final_logit_softcapping",
    "is_encoder_decoder",
    "logit_scale",
    "logits_scaling",
    "moe_intermediate_size",
    "n_routed_experts",
    "no_rope_layers",
    "num_experts",
    "num_kv_shared_layers",
    "num_local_experts",
    "per_layer_config",
    "qk_layernorm",
    "quantization_config",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "text_config",
    "use_bidirectional_attention",
    "use_qk_norm",
    "vision_config",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a model_type says without its config: True and False are fixed, None is for the config to say."""

    qkv_bias: bool | None = False
    out_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    windows: Literal["none", "all", "by layer"] = "none"
    partial_rotary: bool = False
    fused_checkpoint: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that config.json may leave out


_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_FAMILIES = {
    "llama": _Family(qkv_bias=None, out_bias=None, mlp_bias=None, defaults={"max_position_embeddings": 2048}),
    "mistral": _Family(
        windows="all",
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": _Family(qkv_bias=True, windows="by layer", defaults=_QWEN),
    "qwen3": _Family(
        qkv_bias=None, out_bias=None, qk_norm=True, windows="by layer", defaults={**_QWEN, "head_dim": 128}
    ),
    "phi3": _Family(
        windows="all",
        partial_rotary=True,
        fused_checkpoint=True,
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Sizes are counts of numbers; a layer is norm, attention, norm, gated MLP, with residuals."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]  # per layer: how many positions a query sees, itself included; None: all
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    fused_checkpoint: bool  # the checkpoint stores qkv_proj and gate_up_proj
    max_positions: int  # as config.json says it

    @property
    def model_limit(self) -> int:
        """The longest sequence in tokens."""
        return min(self.max_positions, self.rope.max_length or self.max_positions)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DecoderSpec:
        """From the dict of config.json; ConfigError gives the reason why it cannot run on the lean decoder."""
        family = _family(config)
        config = {**family.defaults, **config}
        hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
        kv_heads = _count(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ConfigError(f"its {heads} attention heads do not share {kv_heads} KV heads evenly")
        head_dim = _count(config, "head_dim", hidden // heads)
        layers, max_positions = _count(config, "num_hidden_layers"), _count(config, "max_position_embeddings")
        return cls(
            model_type=config["model_type"],
            vocab_size=_count(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_count(config, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_eps=_epsilon(config),
            rope=_rope(config, family, head_dim, max_positions),
            windows=_windows(config, family, layers),
            qkv_bias=_flag(config, "attention_bias", family.qkv_bias),
            out_bias=_flag(config, "attention_bias", family.out_bias),
            mlp_bias=_flag(config, "mlp_bias", family.mlp_bias),
            qk_norm=family.qk_norm,
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            fused_checkpoint=family.fused_checkpoint,
            max_positions=max_positions,
        )


def why_not_lean(config: Mapping[str, Any]) -> str | None:
    """The reason why a model with this config.json cannot run on the lean decoder, None when it can."""
    try:
        DecoderSpec.from_config(config)
    except ConfigError as error:
        return error.message
    return None


def canonical_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters of a supported config, equal to those of transformers' config object."""
    family = _family(config)
    rope = rope_parameters({**family.defaults, **config}, partial_always=family.partial_rotary)
    if config["model_type"] == "phi3" and rope["rope_type"] in ("su", "yarn"):
        rope["rope_type"] = "longrope"  # what the first Phi-3 checkpoints called it
        rope["original_max_position_embeddings"] = config.get("original_max_position_embeddings", 4096)
    return rope


def _family(config: Mapping[str, Any]) -> _Family:
    """The family, once everything that none of them honours is ruled out."""
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        raise ConfigError(f"model_type {kind!r} is none of {', '.join(_FAMILIES)}")
    names = config.get("architectures") or []
    if names and not any(str(name).endswith("ForCausalLM") for name in names):
        raise ConfigError(f"its architecture {names[0]} is no causal language model")
    activation = config.get("hidden_act", "silu")
    if activation not in _SILU:
        raise ConfigError(f"hidden_act is {activation!r}, not 'silu'")
    if config.get("is_causal") is False:
        raise ConfigError("its attention is not causal")
    for name in _FOREIGN_FIELDS:
        if config.get(name):
            raise ConfigError(f"it sets {name}")
    return _FAMILIES[str(kind)]


def _rope(config: Mapping[str, Any], family: _Family, head_dim: int, max_positions: int) -> RopeSpec:
    rope = canonical_rope(config)
    if not family.partial_rotary and rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"a {config['model_type']} model has no partial_rotary_factor")
    if family.partial_rotary and rope["rope_type"] not in ("default", "longrope"):
        raise ConfigError(f"a {config['model_type']} model has no rotary embedding of type {rope['rope_type']!r}")
    original = config.get("original_max_position_embeddings")
    return RopeSpec.from_parameters(rope, head_dim=head_dim, max_positions=max_positions, original=original)


def _windows(config: Mapping[str, Any], family: _Family, layers: int) -> tuple[int | None, ...]:
    window = None if config.get("sliding_window") is None else _count(config, "sliding_window")
    kinds = config.get("layer_types")
    if family.windows != "by layer":
        expected = "full_attention" if window is None else "sliding_attention"
        if set(kinds or ()) - {expected}:
            raise ConfigError(f"a {config['model_type']} model has no layer_types")
        if family.windows == "none" and window is not None:
            raise ConfigError(f"a {config['model_type']} model has no sliding_window")
        return (window,) * layers
    if not config.get("use_sliding_window", False):
        window = None
    if kinds is None:
        first = layers if window is None else int(config["max_window_layers"])
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    if len(kinds) != layers:
        raise ConfigError(f"layer_types names {len(kinds)} of {layers} layers")
    return tuple(_layer_window(kind, window) for kind in kinds)


def _layer_window(kind: str, window: int | None) -> int | None:
    if kind == "full_attention":
        return None
    if kind != "sliding_attention":
        raise ConfigError(f"it has layers of type {kind}; only full and sliding-window attention run on KV blocks")
    if window is None:
        raise ConfigError("layer_types has sliding_attention, but there is no sliding window")
    return window


def _flag(config: Mapping[str, Any], name: str, fixed: bool | None) -> bool:
    if fixed is None:
        return bool(config.get(name, False))
    if config.get(name) and not fixed:
        raise ConfigError(f"a {config['model_type']} model has no {name}")
    return fixed


def _count(config: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    value = config.get(name)
    value = otherwise if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{name} is not a positive whole number: {value!r}")
    return value


def _epsilon(config: Mapping[str, Any]) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"rms_norm_eps is not a small number: {value!r}")
    return float(value)
