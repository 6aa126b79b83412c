"""Log probabilities of tokens, and the likeliest alternatives, many rows at once.

Owns: log softmax in fp32 (as transformers computes it), and ranking.
Does not: choose tokens or change logits.
Invariants: a row's values depend on that row alone; equal values are ordered by token id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.core.logprobs import TokenLogprob


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.float(), dim=-1)


def best(values: torch.Tensor, counts: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """The `counts[r]` highest of row r as (token id, value), best first."""
    most = min(max(counts, default=0), values.shape[-1])
    if most == 0:
        return [()] * len(counts)
    found = torch.topk(values, most, dim=-1)
    _order_ties(values, found.values, found.indices)
    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [tuple(zip(ids, scores, strict=True))[:count] for (ids, scores), count in zip(pairs, counts, strict=True)]


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Of one token in each row, with the `counts[r]` likeliest ones."""
    logprobs = log_softmax(logits)
    ids = torch.tensor(tokens, device=logits.device)
    chosen = logprobs.gather(-1, ids[:, None])[:, 0].tolist()
    return [TokenLogprob(value, top) for value, top in zip(chosen, best(logprobs, counts), strict=True)]


def _order_ties(values: torch.Tensor, top: torch.Tensor, ids: torch.Tensor) -> None:
    """Equal values by token id, also where only some of them are among the top; topk takes them as they come."""
    least = top[:, -1:]
    crowded = (values == least).sum(-1) > (top == least).sum(-1)
    doubled = (top[:, 1:] == top[:, :-1]).any(-1)
    for row in torch.nonzero(crowded | doubled)[:, 0].tolist():
        order = torch.sort(values[row], descending=True, stable=True)
        ids[row], top[row] = order.indices[: ids.shape[1]], order.values[: ids.shape[1]]
