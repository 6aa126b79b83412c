"""A byte-level BPE tokenizer of a few hundred tokens, and a random model over it, for tests of structured output."""

from __future__ import annotations

from pathlib import Path

import tiny_models
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    '{"name": "Ada", "age": 36, "tags": ["x", "y"], "ok": true, "none": null}',
    '[\n  {"id": 1, "value": -2.5e3},\n  {"id": 20, "value": 0.125}\n]',
    "the quick brown fox jumps over the lazy dog; täglich 日本 2026-11-30T12:00:00Z",
]
PADDING = 37  # the model's ids beyond the tokenizer's
EOS = (0, 1)


def small_tokenizer() -> Tokenizer:
    """0 and 1 end a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|turn|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def save_small_model(path: Path) -> None:
    """A random Llama over this tokenizer's ids and some padding; its logits are far from flat."""
    import torch
    import transformers

    tokenizer = small_tokenizer()
    changes = {"vocab_size": tokenizer.get_vocab_size() + PADDING, "eos_token_id": list(EOS), "bos_token_id": 2}
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**{**tiny_models.BASE, **changes, "tie_word_embeddings": True})
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
