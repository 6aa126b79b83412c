"""Sampler: from logits to token ids, all rows at once.

    mask, forbidden, bias, penalties (worker.sampling.adjustments)  ->  temperature  ->  min_p  ->  top_k  ->  top_p

Owns: the order of these, and which rows need which.
Does not: keep state between steps or decide when a request ends; the arithmetic is in worker.sampling.
Invariants: a row's token depends on its logits, its parameters, its own tokens and its position only, never on other
rows; a plain greedy row costs one argmax; the logits are left as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from cluster.core.logprobs import TokenLogprob
from cluster.core.sampling import SamplingParams
from worker.sampling import logprobs as chances
from worker.sampling.adjustments import Mask, adjust, changed_rows, widened
from worker.sampling.drawing import copied, draw, first_maximum
from worker.sampling.row_extras import RowExtras

T = TypeVar("T")


class Sampler:
    def sample(
        self,
        logits: torch.Tensor,  # [R, V]
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        extras: Sequence[RowExtras | None] = (),
        masks: Sequence[Mask | None] = (),
    ) -> list[int]:
        """One token id per row; `positions[r]` is the position of the token being chosen.

        `extras` and `masks` have one entry per row, or none at all. A mask says which tokens may come, before anything
        else; it must allow one.
        """
        tokens = first_maximum(logits)
        masked, adjusted = changed_rows(extras, masks)
        if not masked and not adjusted:
            draw(tokens, logits, params, positions, range(len(params)))
            return [int(token) for token in tokens.tolist()]
        draw(tokens, logits, params, positions, sorted({*range(len(params))}.difference(masked, adjusted)))
        for rows, copy in ((masked, copied), (adjusted, widened)):
            if rows:
                picked = [params[r] for r in rows]
                own = copy(logits, rows)
                adjust(own, picked, _of(extras, rows), _of(masks, rows))
                chosen = first_maximum(own)
                draw(chosen, own, picked, [positions[r] for r in rows], range(len(rows)))
                tokens[torch.tensor(rows, device=logits.device)] = chosen
        return [int(token) for token in tokens.tolist()]

    def logprobs(
        self, logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int | None]
    ) -> list[TokenLogprob | None]:
        """Each row's token and its `counts[r]` likeliest alternatives where that is not None; by the raw logits."""
        found: list[TokenLogprob | None] = [None] * len(tokens)
        rows = [r for r, count in enumerate(counts) if count is not None]
        if rows:
            index = torch.tensor(rows, device=logits.device)
            values = chances.token_logprobs(logits[index], [tokens[r] for r in rows], [counts[r] or 0 for r in rows])
            for row, value in zip(rows, values, strict=True):
                found[row] = value
        return found

    def logprobs_of_several(
        self, logits: torch.Tensor, tokens: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[tuple[TokenLogprob, ...]]:
        """The same for some tokens of every row, which share their row's alternatives."""
        values = chances.log_softmax(logits)
        tops = chances.best(values, counts)
        return [
            tuple(TokenLogprob(one, top) for one in row[torch.tensor(ids, device=logits.device)].tolist())
            for row, ids, top in zip(values, tokens, tops, strict=True)
        ]

    def candidates(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        extras: Sequence[RowExtras | None],
        masks: Sequence[Mask | None] = (),
    ) -> list[tuple[tuple[int, float], ...]]:
        """The likeliest next tokens of each row that wants any, with their log probabilities, best first.

        What adjusts logits adjusts the log probabilities here, as in transformers' beam search.
        """
        found: list[tuple[tuple[int, float], ...]] = [()] * len(extras)
        rows = [r for r, extra in enumerate(extras) if extra is not None and extra.candidates]
        if rows:
            values = chances.log_softmax(logits[torch.tensor(rows, device=logits.device)])
            own, own_masks = _of(extras, rows), _of(masks, rows)
            if any(changed_rows(own, own_masks)):
                values = values.double()
                adjust(values, [params[r] for r in rows], own, own_masks)
            counts = [0 if extra is None else extra.candidates for extra in own]
            for row, best in zip(rows, chances.best(values, counts), strict=True):
                found[row] = best
        return found


def _of(values: Sequence[T], rows: Sequence[int]) -> list[T]:
    """Those of some rows; none when there are none at all."""
    return [values[row] for row in rows] if values else []
