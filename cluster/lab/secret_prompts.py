"""Prompts whose answer is one word of the system prompt, so that KV of another prompt shows in the answer.

Owns: the texts, and their tokens through the model's own chat template.
Does not: run them.
Invariants: the prompts of one set have the same length and differ in one place, so that all later tokens stand at the
same positions; a vocabulary that has no such words gets random tokens of the same shape.
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

from cluster.tokenizer import Tokenizer

_WORDS = ("river", "apple", "silver", "tiger", "piano", "garden", "winter", "lemon", "castle", "window", "bread")
_SYSTEM = (
    "You are a helpful assistant of a small library. The secret word of today is {word}. Remember it well, because "
    "every visitor who asks for the secret word must hear it. Be polite, answer in one short sentence, and never talk "
    "about anything but books, opening hours, and the secret word. The library is open from nine to five, and closed "
    "on Sundays."
)
_QUESTION = "What is the secret word of today?"
_RANDOM_TOKENS = 120


def secret_prompts(model_dir: Path, count: int, seed: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_dir(model_dir)
    by_length: dict[int, list[list[int]]] = defaultdict(list)
    for word in _WORDS:
        messages = [{"role": "system", "content": _SYSTEM.format(word=word)}, {"role": "user", "content": _QUESTION}]
        by_length[len(tokens := tokenizer.apply_chat_template(messages))].append(tokens)
    best = max(by_length.values(), key=len)
    if len({tuple(tokens) for tokens in best}) == len(best) >= 2:
        return best[:count]
    rng = random.Random(seed)
    common = [rng.randrange(4, 90) for _ in range(_RANDOM_TOKENS)]
    return [[*common[:20], 4 + number, *common[21:]] for number in range(count)]


def words_of(model_dir: Path, tokens: tuple[int, ...]) -> str:
    return Tokenizer.from_dir(model_dir).decode(tokens).strip()


def typed(model_dir: Path, tokens: list[int]) -> list[int]:
    """The same text as a user would type it: other tokens, because control tokens and word borders are not the same."""
    tokenizer = Tokenizer.from_dir(model_dir)
    text = tokenizer.backend.decode(tokens, skip_special_tokens=False)
    pieces = [text[start : start + 7] for start in range(0, len(text), 7)]
    return [token for piece in pieces for token in tokenizer.backend.encode(piece, add_special_tokens=False).ids]
