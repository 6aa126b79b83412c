"""GrammarState: how far one sequence has come in its grammar.

Owns: the matcher of the sequence, and the number of tokens it has accepted.
Does not: choose tokens, or touch logits.
Invariants: a pure function of the grammar and the accepted tokens, so a state rebuilt by `replay` equals a live one;
an end-of-sequence token is allowed exactly when the text may end here; when nothing else can follow, it is the only
one; forks share nothing that changes. Methods may be called from several threads: they take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import llguidance
import numpy as np

from cluster.core.errors import InvalidRequest, KvrayError
from worker.grammar.vocabulary import Bitmask, Vocabulary


class GrammarState:
    """Made by `CompiledGrammar.start` and `fork`."""

    def __init__(self, start: Callable[[], llguidance.LLMatcher], vocabulary: Vocabulary, field: str) -> None:
        """start: gives a matcher at the grammar's beginning.  field: the name of the constraint in errors."""
        self._start = start
        self._vocabulary = vocabulary
        self._field = field
        self._matcher = start()
        self._lock = threading.Lock()
        self.num_tokens = 0

    @property
    def num_words(self) -> int:
        """Of its masks."""
        return self._vocabulary.num_words

    @property
    def can_end(self) -> bool:
        """The text so far is a whole text of the grammar."""
        with self._lock:
            return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Nothing but an end-of-sequence token can follow, or one has come: the request can end."""
        with self._lock:
            return self._matcher.is_stopped() and self._matcher.is_accepting()

    def fill_mask(self, row: Bitmask) -> int:
        """Set the bits of the tokens that may come next, clear all others; returns the number of tokens so far.

        row: int32, `vocabulary.num_words` of them.  InvalidRequest when the grammar got too complex or asks for the
        impossible; the request cannot go on then.
        """
        assert row.flags.c_contiguous and row.dtype == np.int32, f"a mask of {row.dtype}, strides {row.strides}"
        with self._lock:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)  # other threads run meanwhile
            if self._matcher.is_error():
                raise self._dead_end(self._matcher.get_error().split("\n", 1)[0])
            # The library lets a grammar ask for end-of-sequence tokens in the middle, and for ids without a token.
            may_end = self._matcher.is_accepting()
            count = self.num_tokens
        np.bitwise_and(row, self._vocabulary.tokens if may_end else self._vocabulary.tokens_but_eos, out=row)
        if not row.any():
            raise self._dead_end("no token can follow")
        return count

    def accept(self, token_id: int) -> None:
        """Move on by the token that was chosen; KvrayError when the grammar does not allow it."""
        with self._lock:
            if not self._matcher.consume_token(token_id):
                raise KvrayError(f"token {token_id} at {self.num_tokens} is not allowed by the {self._field}")
            self.num_tokens += 1

    def replay(self, token_ids: Sequence[int]) -> None:
        """Start over and accept `token_ids`; about 10 us for each."""
        matcher = self._start()
        with self._lock:
            self._matcher = matcher
            self.num_tokens = 0
            if not matcher.consume_tokens(list(token_ids)):
                raise KvrayError(f"the tokens so far are not allowed by the {self._field}")
            self.num_tokens = len(token_ids)

    def fork(self) -> GrammarState:
        """An independent state at the same place."""
        copy = GrammarState(self._start, self._vocabulary, self._field)
        with self._lock:
            copy._matcher = self._matcher.deep_copy()
            copy.num_tokens = self.num_tokens
        return copy

    def _dead_end(self, reason: str) -> InvalidRequest:
        return InvalidRequest(self._field, f"{self._field} cannot be followed after {self.num_tokens} tokens: {reason}")
