"""PrefixCount: how many tokens of a prompt a cache should find, counted without a cache.

    whole prompt   all tokens but the last, if the very same prompt was computed before
    chunks         the longest run of whole chunks that some sequence before had too
    longest        the longest common beginning with any sequence before, token by token

The last token of a prompt is always computed, because its logits are wanted.

Owns: these three definitions, written as plainly as they are said.
Does not: know blocks, eviction or an engine, whose hits are compared with these counts.
Invariants: a count depends only on the sequences learnt before; nothing is ever forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class PrefixCount(Protocol):
    def hit(self, prompt: Sequence[int]) -> int:
        """Tokens of the prompt that need not be computed."""

    def learn(self, prompt: Sequence[int], computed: Sequence[int]) -> None:
        """`computed`: the prompt, and the tokens behind it whose KV was computed as well."""


class NothingCount:
    def hit(self, prompt: Sequence[int]) -> int:
        return 0

    def learn(self, prompt: Sequence[int], computed: Sequence[int]) -> None:
        pass


class WholePromptCount:
    def __init__(self) -> None:
        self._prompts: set[tuple[int, ...]] = set()

    def hit(self, prompt: Sequence[int]) -> int:
        return len(prompt) - 1 if tuple(prompt) in self._prompts else 0

    def learn(self, prompt: Sequence[int], computed: Sequence[int]) -> None:
        self._prompts.add(tuple(prompt))


class ChunkCount:
    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._prefixes: set[tuple[int, ...]] = set()

    def hit(self, prompt: Sequence[int]) -> int:
        found = 0
        for end in range(self._chunk_tokens, len(prompt), self._chunk_tokens):
            if tuple(prompt[:end]) not in self._prefixes:
                break
            found = end
        return found

    def learn(self, prompt: Sequence[int], computed: Sequence[int]) -> None:
        ends = range(self._chunk_tokens, len(computed) + 1, self._chunk_tokens)
        self._prefixes.update(tuple(computed[:end]) for end in ends)


class LongestPrefixCount:
    """`whole`: count whole blocks of so many tokens only; 1 is to the token."""

    def __init__(self, whole: int = 1) -> None:
        self._whole = whole
        self._sequences: list[tuple[int, ...]] = []

    def hit(self, prompt: Sequence[int]) -> int:
        longest = max((common_beginning(prompt[:-1], one) for one in self._sequences), default=0)
        return longest - longest % self._whole

    def learn(self, prompt: Sequence[int], computed: Sequence[int]) -> None:
        self._sequences.append(tuple(computed))


def common_beginning(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count
