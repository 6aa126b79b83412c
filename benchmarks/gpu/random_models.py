"""Random models made from transformers' configs, for machines without a model on disk.

Owns: their sizes, and writing them as Hugging Face directories without a tokenizer.
Does not: keep them: the caller names the directory.
Invariants: a family has the same weights in every run; biases and norms are random too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # config class, differences from TINY
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 128}),
}
# As large as the demo model, so that figures of the two can be compared.
DEMO_SIZED: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def save_tiny(family: str, path: Path) -> None:
    name, changes = FAMILIES[family]
    _save(name, {**TINY, **changes}, path, torch.float32)


def save_demo_sized(path: Path) -> None:
    _save("LlamaConfig", DEMO_SIZED, path, torch.bfloat16)


def _save(config_class: str, values: dict[str, Any], path: Path, dtype: torch.dtype) -> None:
    import transformers  # takes seconds, and not every machine has it

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(len(config_class))
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**values), dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn(parameter.shape, dtype=dtype) * 0.1)
    model.save_pretrained(path)
