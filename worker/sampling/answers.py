"""Answers: from a step's logits to what each row is told.

    logits   rows that sample, in batch order   [0, S)
             prompt rows with log probabilities [S, ...): the scheduled tokens of such a row but its last, which samples

Owns: this order, and asking the sampler for no more than the rows want.
Does not: sample (worker.sampler) or run models (worker.model_runner).
Invariants: one Sampled per row with `sample`, in batch order; a batch of plain rows costs what sampling costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.core.logprobs import TokenLogprob
from worker.batch import ScheduledSeq
from worker.runner import Sampled
from worker.sampler import Sampler
from worker.sampling.adjustments import Mask
from worker.sampling.row_extras import RowExtras

_Candidates = tuple[tuple[int, float], ...]


def answer(
    sampler: Sampler, logits: torch.Tensor, rows: Sequence[ScheduledSeq], masks: Sequence[Mask | None] = ()
) -> list[Sampled]:
    """`rows` are those of the batch with `sample`; `masks` has one entry for each, or none at all."""
    params, positions = [row.sampling for row in rows], [row.end for row in rows]
    extras = [row.extras for row in rows]
    own = logits[: len(rows)]
    if not any(extras):
        return [Sampled(token) for token in sampler.sample(own, params, positions, masks=masks)]
    tokens = sampler.sample(own, params, positions, extras, masks)
    logprobs = sampler.logprobs(own, tokens, [None if e is None or e.candidates else e.logprobs for e in extras])
    candidates = sampler.candidates(own, params, extras, masks)
    theirs = _of_candidates(sampler, own, extras, candidates)
    prompts = _of_prompts(sampler, logits, rows)
    return [Sampled(*parts) for parts in zip(tokens, logprobs, candidates, theirs, prompts, strict=True)]


def prompt_rows(row: ScheduledSeq) -> int:
    """How many logits beyond its last token's a row needs."""
    wanted = row.extras is not None and row.extras.prompt_logprobs is not None
    return len(row.token_ids) - 1 if wanted else 0


def _of_candidates(
    sampler: Sampler, logits: torch.Tensor, extras: Sequence[RowExtras | None], candidates: Sequence[_Candidates]
) -> list[tuple[TokenLogprob, ...]]:
    """The model's log probability of every candidate, where log probabilities are wanted."""
    found: list[tuple[TokenLogprob, ...]] = [()] * len(extras)
    wanted = {r: e.logprobs for r, e in enumerate(extras) if e is not None and e.candidates and e.logprobs is not None}
    if wanted:
        tokens = [[token for token, _ in candidates[r]] for r in wanted]
        own = logits[torch.tensor(list(wanted), device=logits.device)]
        for row, values in zip(wanted, sampler.logprobs_of_several(own, tokens, list(wanted.values())), strict=True):
            found[row] = values
    return found


def _of_prompts(sampler: Sampler, logits: torch.Tensor, rows: Sequence[ScheduledSeq]) -> list[tuple[TokenLogprob, ...]]:
    """Log probabilities of the prompt tokens behind the scheduled ones, all rows in one go."""
    places: list[int] = []  # in `logits`
    tokens: list[int] = []
    counts: list[int | None] = []
    ends: list[int] = []
    next_place = len(rows)
    for index, row in enumerate(rows):
        extra = row.extras
        if extra is not None and extra.prompt_logprobs is not None:
            behind = prompt_rows(row)
            places += range(next_place, next_place + behind)
            tokens += row.token_ids[1:]
            next_place += behind
            if extra.next_prompt_token is not None:
                places.append(index)
                tokens.append(extra.next_prompt_token)
            counts += [extra.prompt_logprobs] * (len(places) - len(counts))
        ends.append(len(places))
    if not places:
        return [()] * len(rows)
    found = sampler.logprobs(logits[torch.tensor(places, device=logits.device)], tokens, counts)
    values = [value for value in found if value is not None]
    return [tuple(values[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
