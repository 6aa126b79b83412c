"""MaskWorker: masks of the coming step, computed while the model runs.

Owns: one thread, and the masks that were asked for last.
Does not: accept tokens; the engine does, before it asks for the next masks.
Invariants: what `apply` does depends on the states alone, not on the thread's progress: a mask that is not there, or
belongs to another place in the text, is computed at once. `prepare` and `apply` are called by one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from cluster.core.errors import KvrayError
from worker.grammar.grammar_state import GrammarState
from worker.grammar.logits_mask import apply_bitmasks
from worker.grammar.mask_set import MaskSet
from worker.grammar.vocabulary import Bitmask


class MaskWorker:
    def __init__(self, num_words: int) -> None:
        """num_words: of the vocabulary's masks."""
        self._num_words = num_words
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-masks")
        self._coming: Future[MaskSet] | None = None

    def prepare(self, states: Sequence[GrammarState]) -> None:
        """Begin with the masks of the states' next tokens. Masks that were prepared before are forgotten."""
        self._coming = self._thread.submit(MaskSet, list(states), self._num_words) if states else None

    def apply(self, logits: torch.Tensor, states: Sequence[GrammarState | None]) -> dict[int, KvrayError]:
        """Mask row r of `logits` ([R, V], in place) by states[r], if there is one.

        Returns the rows whose state has no mask, with the reason: their logits are untouched, their requests must end.
        """
        constrained = [(row, state) for row, state in enumerate(states) if state is not None]
        if not constrained:
            return {}
        coming, self._coming = self._coming, None
        ready = MaskSet([], self._num_words) if coming is None else coming.result()
        late = MaskSet([s for _, s in constrained if ready.find(s) is None], self._num_words)
        rows: list[int] = []
        masks: list[Bitmask] = []
        failed: dict[int, KvrayError] = {}
        for row, state in constrained:
            outcome = ready.find(state)
            outcome = late.find(state) if outcome is None else outcome
            if isinstance(outcome, KvrayError):
                failed[row] = outcome
            else:
                assert outcome is not None, f"the state of row {row} moved while its mask was applied"
                rows.append(row)
                masks.append(outcome)
        apply_bitmasks(logits, rows, masks)
        return failed

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
