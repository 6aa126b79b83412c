"""Tiny random models of every family as Hugging Face directories, and a tokenizer that fits them."""

from __future__ import annotations

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
# One word per id of BASE's vocabulary, special tokens first.
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(4, 96))]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}w4"


def save_model(family: str, path: Path) -> None:
    """A random fp32 model of that family; the same weights in every run."""
    import torch
    import transformers

    config_class, changes = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**BASE, **changes})
    torch.manual_seed(len(family))
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)


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
