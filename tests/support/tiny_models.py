"""Tiny random models of every family as Hugging Face directories, and a tokenizer that fits them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# family -> (config class, differences from BASE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"sliding_window": 11}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 8,
            "sliding_window": 9,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": None}),
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
    "long_factor": [2.0] * 6,
}
# The families of the lean decoder, with every switch they have. Their biases and norms are random too.
LEAN_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-untied": ("LlamaConfig", {"head_dim": 64, "num_key_value_heads": 1}),
    "llama-biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama-3-rope": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE, "head_dim": 16}),
    "mistral-window": ("MistralConfig", {"sliding_window": 11, "head_dim": 80}),
    "qwen2-bias": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-windows": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3-norms": ("Qwen3Config", {"head_dim": 16}),
    "qwen3-layer-types": (
        "Qwen3Config",
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3-plain": ("Phi3Config", {}),
    "phi3-window": ("Phi3Config", {"sliding_window": 13, "tie_word_embeddings": True}),
    "phi3-partial": (
        "Phi3Config",
        {"hidden_size": 64, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 128},
    ),
}
# One word per id of BASE's vocabulary, special tokens first.
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(4, 96))]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}w4"


def save_model(family: str, path: Path) -> None:
    """A random fp32 model of that family; the same weights in every run."""
    import torch
    import transformers

    config_class, changes = {**FAMILIES, **LEAN_FAMILIES}[family]
    config = getattr(transformers, config_class)(**copy.deepcopy({**BASE, **changes}))
    torch.manual_seed(len(family))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if family in LEAN_FAMILIES:
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases, which start as zeros, and norms, which start as ones
                parameter.data.add_(torch.randn(parameter.shape) * 0.3)
    model.save_pretrained(path)


def save_tokenizer(path: Path) -> None:
    """Words between spaces: "w4 w5" is ids 4 and 5; a chat is its messages followed by w4."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(WORDS[:4])
    backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
