"""Words of exactly one token: found in a vocabulary, checked together, and refused when there are too few."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from cluster.bench.word_list import single_token_words
from cluster.core.errors import ConfigError
from cluster.tokenizer import Tokenizer


class FakeCodec:
    """Spaces separate tokens; a word in `split` is two tokens, and every text starts with one special token."""

    def __init__(self, words: list[str], split: frozenset[str] = frozenset()) -> None:
        self._pieces = [f" {word}" for word in words] + ["x", " Upper", " w1th", " ab", " -"]
        self._split = split
        self.vocab_size = len(self._pieces)

    def encode(self, text: str) -> list[int]:
        return [0] + [1 for word in text.split() for _ in range(2 if word in self._split else 1)]

    def decode(self, token_ids: list[int]) -> str:
        return self._pieces[token_ids[0]]


NAMES = ["".join(letters) for letters in itertools.islice(itertools.product("abcd", repeat=5), 100)]


def test_only_plain_words_that_are_one_token() -> None:
    words = single_token_words(FakeCodec(NAMES, split=frozenset(NAMES[:10])))
    assert sorted(words) == NAMES[10:]
    assert words == single_token_words(FakeCodec(NAMES, split=frozenset(NAMES[:10])))


def test_too_few_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few plain words"):
        single_token_words(FakeCodec(NAMES[:10]))


@pytest.mark.model
def test_the_demo_tokenizer_has_enough(demo_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(demo_model_dir)
    words = single_token_words(tokenizer)
    assert len(words) == 600
    assert len(tokenizer.encode("".join(f" {word}" for word in words[::-1]))) == 600
