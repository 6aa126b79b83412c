"""MaskSet: the masks of some sequences' coming tokens.

Owns: computing them one after the other, and finding a state's mask again.
Does not: use threads, or touch logits.
Invariants: a mask is found only for the state it was computed for, and only while that state has not moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.core.errors import KvrayError
from worker.grammar.grammar_state import GrammarState
from worker.grammar.vocabulary import Bitmask

Outcome = Bitmask | KvrayError


class MaskSet:
    """`MaskSet(states)` computes the mask of every state; all states have the same vocabulary."""

    def __init__(self, states: Sequence[GrammarState]) -> None:
        self._entries: dict[GrammarState, tuple[int, Outcome]] = {}
        masks = np.empty((len(states), states[0].num_words if states else 0), dtype=np.int32)
        for state, mask in zip(states, masks, strict=True):
            try:
                self._entries[state] = (state.fill_mask(mask), mask)
            except KvrayError as error:
                self._entries[state] = (state.num_tokens, error)

    def find(self, state: GrammarState) -> Outcome | None:
        """The state's mask, or why there is none; None when it was not computed for this place in the text."""
        num_tokens, outcome = self._entries.get(state, (-1, None))
        return outcome if num_tokens == state.num_tokens else None
