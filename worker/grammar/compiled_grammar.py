"""CompiledGrammar: one constraint, ready to start any number of sequences.

Owns: the matcher at the grammar's beginning, warmed up so that the first step finds its first mask quickly.
Does not: cache (worker.grammar.compiler) or follow a sequence (worker.grammar.grammar_state).
Invariants: the matcher is never moved after construction; `start` may be called from any thread.
Some text matches the grammar's first steps, or the constructor raises `InvalidRequest`.
"""

from __future__ import annotations

import llguidance
import numpy as np

from cluster.core.constraint import Constraint
from worker.grammar.grammar_source import LIMITS, refusal, source_of
from worker.grammar.grammar_state import GrammarState
from worker.grammar.vocabulary import Vocabulary

# Grammars that are too complex often show it behind the first tokens, not at once.
_PROBE_STEPS = 3


class CompiledGrammar:
    def __init__(self, constraint: Constraint, vocabulary: Vocabulary) -> None:
        """Compile. It recurses as deeply as the constraint is nested: the caller gives its thread a large stack."""
        self.constraint = constraint
        self.vocabulary = vocabulary
        source = source_of(constraint)
        self._matcher = llguidance.LLMatcher(vocabulary.trie, source, log_level=0, limits=LIMITS)
        if self._matcher.is_error():
            raise refusal(constraint, self._matcher.get_error())
        self._probe(self._matcher.deep_copy())
        mask = np.empty(vocabulary.num_words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def start(self) -> GrammarState:
        """The state of a sequence that has no token yet."""
        return GrammarState(self._matcher.deep_copy, self.vocabulary, self.constraint.field)

    def _probe(self, matcher: llguidance.LLMatcher) -> None:
        """Follow the lowest allowed token for some steps: a grammar without any text, or too complex, shows here."""
        mask = np.empty(self.vocabulary.num_words, dtype=np.int32)
        for _ in range(_PROBE_STEPS):
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            allowed = np.flatnonzero(mask & self.vocabulary.tokens_but_eos)
            if matcher.is_error() or (len(allowed) == 0 and not matcher.is_accepting()):
                reason = matcher.get_error().split("\n", 1)[0] or "an end-of-sequence token inside"
                raise refusal(self.constraint, f"no text matches, or it is too complex ({reason})")
            if len(allowed) == 0:
                return
            word = int(allowed[0])
            bits = int(mask[word] & self.vocabulary.tokens_but_eos[word])
            matcher.consume_token(32 * word + (bits & -bits).bit_length() - 1)
