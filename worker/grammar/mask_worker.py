"""MaskWorker: masks of the coming step, computed while the model runs.

Owns: one thread, and the masks that were asked for last.
Does not: accept tokens; the engine does, before it asks for the next masks.
Invariants: what `masks` gives depends on the states alone, not on the thread's progress: a mask that is not there, or
belongs to another place in the text, is computed at once. `prepare` and `masks` are called by one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from cluster.core.errors import KvrayError
from worker.grammar.grammar_state import GrammarState
from worker.grammar.logits_mask import allowed_tokens
from worker.grammar.mask_set import MaskSet
from worker.grammar.vocabulary import Bitmask


class MaskWorker:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-masks")
        self._coming: Future[MaskSet] | None = None

    def prepare(self, states: Sequence[GrammarState]) -> None:
        """Begin with the masks of the states' next tokens. Masks that were prepared before are forgotten."""
        self._coming = self._thread.submit(MaskSet, list(states)) if states else None

    def masks(
        self, states: Sequence[GrammarState | None], size: int, device: torch.device
    ) -> tuple[list[torch.Tensor | None], dict[int, KvrayError]]:
        """What each state allows, of a vocabulary of `size` tokens: [size] bool, None for a row without a state.

        And the rows whose state has no mask, with the reason: they have None, too, and their requests must end.
        """
        constrained = [(row, state) for row, state in enumerate(states) if state is not None]
        coming, self._coming = self._coming, None
        ready = MaskSet([]) if coming is None else coming.result()
        late = MaskSet([state for _, state in constrained if ready.find(state) is None])
        masks: dict[int, Bitmask] = {}
        failed: dict[int, KvrayError] = {}
        for row, state in constrained:
            outcome = ready.find(state)
            outcome = late.find(state) if outcome is None else outcome
            if isinstance(outcome, KvrayError):
                failed[row] = outcome
            else:
                assert outcome is not None, f"the state of row {row} moved while its mask was asked for"
                masks[row] = outcome
        found: list[torch.Tensor | None] = [None] * len(states)
        if masks:
            for row, allowed in zip(masks, allowed_tokens(list(masks.values()), size, device), strict=True):
                found[row] = allowed
        return found, failed

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
