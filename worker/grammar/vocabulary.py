"""Vocabulary: the tokens of a model as the grammar library sees them.

Owns: the library's tokenizer (a trie of all tokens' bytes), which takes about a second to build without letting other
threads run, so it is built when an engine starts; and which ids may be allowed at all.
Does not: encode prompts.
Invariants: masks have one bit per id of the model or the tokenizer, whichever has more, in int32 words, lowest bit
first; ids without a token (a padded embedding) are never allowed. All attributes may be read from several threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import llguidance
import numpy as np
import numpy.typing as npt
import tokenizers

from cluster.core.errors import ConfigError

Bitmask = npt.NDArray[np.int32]


class Vocabulary:
    def __init__(self, tokenizer: tokenizers.Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """vocab_size: of the model.  eos_token_ids: what ends an answer; at least one."""
        ids = set(tokenizer.get_vocab(with_added_tokens=True).values())
        size = max(vocab_size, max(ids) + 1)
        self.eos_token_ids = tuple(eos_token_ids)
        if not self.eos_token_ids or not ids.issuperset(self.eos_token_ids):
            raise ConfigError(f"structured output needs end-of-sequence tokens of the tokenizer, not {eos_token_ids}")
        try:
            self.trie = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=list(self.eos_token_ids))
        except ValueError as error:
            raise ConfigError(f"structured output cannot use this model's tokenizer: {error}") from error
        self.num_words = (size + 31) // 32
        self.tokens = _bits(ids, self.num_words)
        self.tokens_but_eos = _bits(ids.difference(self.eos_token_ids), self.num_words)


def _bits(ids: Iterable[int], num_words: int) -> Bitmask:
    flags = np.zeros(num_words * 32, dtype=np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
