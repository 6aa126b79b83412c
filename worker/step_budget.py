"""StepBudget: the step in the making: tokens per sequence, and what is left to give.

Owns: the token budget, and the bound on prompt tokens whose log probabilities are told in one step.
Does not: choose who runs (scheduler).
Invariants: neither bound is exceeded.
"""

from __future__ import annotations

from worker.sequence import Sequence

# Each of them needs a row of logits as wide as the vocabulary.
MAX_SCORED = 128


class StepBudget:
    def __init__(self, budget: int) -> None:
        self.tokens: dict[str, int] = {}
        self.left = budget
        self._scored = MAX_SCORED

    def take(self, seq: Sequence) -> None:
        count = min(seq.num_uncomputed, self.left)
        if seq.scores_prompt:
            count = min(count, self._scored)
            self._scored -= count
        if count:
            self.tokens[seq.seq_id] = count
            self.left -= count

    def give_back(self, seq: Sequence) -> None:
        self.left += self.tokens.pop(seq.seq_id, 0)
