"""Two vocabularies to test grammars with, and a sampler that is free but for the mask."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from small_tokenizer import EOS, PADDING, small_tokenizer
from tokenizers import Tokenizer

from cluster.model_source import DEMO_NAME, default_cache_dir
from worker.grammar.compiled_grammar import CompiledGrammar
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.grammar_state import GrammarState
from worker.grammar.vocabulary import Vocabulary

DEMO = default_cache_dir() / "models" / DEMO_NAME / "tokenizer.json"
LIMIT = 250  # tokens
FREE = 30  # tokens after which the sampler looks for an end


class World:
    """A tokenizer, its vocabulary and its compiler."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self.eos = eos_token_ids
        self.vocab_size = vocab_size
        self.vocabulary = Vocabulary(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self.compiler = GrammarCompiler(lambda: self.vocabulary)
        texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(vocab_size)]
        self._ends = list(eos_token_ids)
        self._closing = np.array([text[:1] in ('"', "}", "]", "@") for text in texts])

    def mask(self, state: GrammarState) -> npt.NDArray[np.int32]:
        row = np.full(self.vocabulary.num_words, -1, dtype=np.int32)
        state.fill_mask(row)
        return row

    def allowed(self, state: GrammarState) -> npt.NDArray[np.int64]:
        bits = np.unpackbits(self.mask(state).view(np.uint8), bitorder="little")
        return np.flatnonzero(bits)

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    def sample(self, grammar: CompiledGrammar, seed: int) -> tuple[list[int], bool]:
        """Tokens, uniform among the allowed, drawn to an end the more the longer it gets; and whether they ended."""
        rng = random.Random(seed)
        state, tokens = grammar.start(), list[int]()
        while len(tokens) < LIMIT:
            bits = np.unpackbits(self.mask(state).view(np.uint8), bitorder="little")
            may_end = bool(bits[self._ends].any())
            assert may_end == bits[self._ends].all() == state.can_end
            bits[self._ends] = 0
            allowed = np.flatnonzero(bits)
            assert state.is_finished == (len(allowed) == 0)
            if may_end and (len(allowed) == 0 or rng.random() < 0.5):
                state.accept(self.eos[0])
                assert state.is_finished
                return tokens, True
            assert len(allowed), f"a dead end after {self.text(tokens)!r}"
            if rng.random() < (0.15 if len(tokens) < FREE else 0.9):
                closing = allowed[self._closing[allowed]]
                allowed = closing if len(closing) else allowed
            tokens.append(int(allowed[rng.randrange(len(allowed))]))
            state.accept(tokens[-1])
        return tokens, False

    def texts(self, grammar: CompiledGrammar, samples: int) -> list[str]:
        """Texts of the samples that ended; at least one in four did. Half as many with a real, large vocabulary."""
        samples //= 1 if self.vocab_size < 1000 else 2
        runs = [self.sample(grammar, seed) for seed in range(samples)]
        ended = [self.text(tokens) for tokens, end in runs if end]
        assert len(ended) >= samples // 4
        return ended


def _world(name: str) -> World:
    if name == "small":
        tokenizer = small_tokenizer()
        return World(tokenizer, tokenizer.get_vocab_size() + PADDING, EOS)
    if not DEMO.exists():
        pytest.skip("the demo model is not on this machine")
    return World(Tokenizer.from_file(str(DEMO)), 49152, (2,))


@pytest.fixture(scope="session", params=["small", "demo"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = _world(request.param)
    yield made
    made.compiler.close()


@pytest.fixture(scope="session")
def small_world() -> Iterator[World]:
    made = _world("small")
    yield made
    made.compiler.close()
