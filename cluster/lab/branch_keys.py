"""Three ways to keep A, A-B and A-C findable, and the work that each does: entries, KV kept, tokens hashed.

    whole-prefix keys   one entry per sequence, hash(A), hash(A-B), hash(A-C), each with its own run of KV
    chained chunks      one entry per chunk, hash(parent, chunk): A's chunks are there once
    (radix)             one node per branch, no hashes: the production class is measured instead (prefix_branches)

Owns: the first two, as counts.
Does not: keep KV; a table here holds what a real one would look up.
Invariants: `hashed` counts tokens that went through the hash function, in lookups and in inserts; sequences are whole
chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Tokens = tuple[int, ...]


class BranchKeys(Protocol):
    hashed: int

    @property
    def num_entries(self) -> int: ...

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the entries hold, counted as often as it is held."""

    def lookup(self, tokens: Sequence[int]) -> int:
        """Tokens found."""

    def insert(self, tokens: Sequence[int]) -> None: ...


class WholePrefixKeys:
    """As in the article: the key covers everything from the first token, and a lookup tries from long to short."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._entries: set[Tokens] = set()
        self.hashed = 0

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    @property
    def kv_tokens(self) -> int:
        return sum(len(entry) for entry in self._entries)

    def lookup(self, tokens: Sequence[int]) -> int:
        for length in range(len(tokens), 0, -self._chunk_tokens):
            self.hashed += length
            if tuple(tokens[:length]) in self._entries:
                return length
        return 0

    def insert(self, tokens: Sequence[int]) -> None:
        self.hashed += len(tokens)
        self._entries.add(tuple(tokens))


class ChainedChunks:
    """A key covers one chunk and its parent's key, so each chunk of a chain is hashed and kept once."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._entries: set[Tokens] = set()  # by all tokens up to the chunk's end: what the chained hash stands for
        self.hashed = 0

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    @property
    def kv_tokens(self) -> int:
        return len(self._entries) * self._chunk_tokens

    def lookup(self, tokens: Sequence[int]) -> int:
        for end in range(self._chunk_tokens, len(tokens) + 1, self._chunk_tokens):
            self.hashed += self._chunk_tokens
            if tuple(tokens[:end]) not in self._entries:
                return end - self._chunk_tokens
        return len(tokens)

    def insert(self, tokens: Sequence[int]) -> None:
        """A chunk that is there already is not hashed again: its key is known from the lookup before."""
        for end in range(self._chunk_tokens, len(tokens) + 1, self._chunk_tokens):
            if tuple(tokens[:end]) not in self._entries:
                self.hashed += self._chunk_tokens
                self._entries.add(tuple(tokens[:end]))
