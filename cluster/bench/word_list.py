"""WordList: words that are exactly one token each when a space precedes them.

Owns: choosing them from a tokenizer's vocabulary, and checking that a text of N words is N tokens.
Does not: write prompts (workloads).
Invariants: the list is the same for the same tokenizer; every pair was checked in one long text, not only each alone.
"""

from __future__ import annotations

import random
from typing import Protocol

from cluster.core.errors import ConfigError

_WANTED = 600
_ENOUGH = 50
_SHORTEST = 4  # letters; shorter ones merge with their neighbours in some vocabularies


class Codec(Protocol):
    """The part of cluster.tokenizer.Tokenizer that is needed here."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: list[int]) -> str: ...


def single_token_words(tokenizer: Codec, wanted: int = _WANTED) -> list[str]:
    """At most `wanted` words. ConfigError when the vocabulary has too few."""
    pieces = (tokenizer.decode([token_id]) for token_id in range(tokenizer.vocab_size))
    words = sorted({piece[1:] for piece in pieces if _is_word(piece)})
    random.Random(0).shuffle(words)
    around = len(tokenizer.encode(""))  # special tokens that the model wants around a prompt
    chosen = words[:wanted]
    if not _is_exact(tokenizer, chosen, around):
        chosen = [word for word in words if len(tokenizer.encode(f" {word}")) == around + 1][:wanted]
    if len(chosen) < _ENOUGH or not _is_exact(tokenizer, chosen, around):
        raise ConfigError("this tokenizer has too few plain words of one token: the workloads cannot be written for it")
    return chosen


def _is_word(piece: str) -> bool:
    word = piece[1:]
    return piece[:1] == " " and len(word) >= _SHORTEST and word.isascii() and word.isalpha() and word.islower()


def _is_exact(tokenizer: Codec, words: list[str], around: int) -> bool:
    text = "".join(f" {word}" for word in words)
    return len(tokenizer.encode(text)) == around + len(words)
