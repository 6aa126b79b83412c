"""Drawing: from logits to probabilities to one token per row.

A sampled row draws exactly one number u in [0, 1) from its own (seed, position), and takes the first token at which the
cumulated probability exceeds u. So a seeded answer does not depend on batching, preemption or caching.

Owns: temperature, min-p, top-k, top-p, greedy choice, and the counter-based random number.
Does not: change logits (adjustments).
Invariants: a row's token depends on that row alone; top_k = 1 is greedy; the filters keep a beginning of the tokens
ranked by probability, equal ones by token id; probabilities are fp64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.core.sampling import SamplingParams

_MASK = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15
_CANDIDATES = 1024  # ranking the whole vocabulary is eight times slower and hardly ever needed
_NUMPY_TYPES = (torch.float32, torch.float64)


def draw(
    tokens: torch.Tensor,
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    rows: Sequence[int],
) -> None:
    """Put a drawn token in the place of the greedy one in those of `rows` that are sampled."""
    sampled = [r for r in rows if not params[r].greedy and params[r].top_k != 1]
    plain = [r for r in sampled if params[r].top_k == 0 and params[r].top_p == 1.0]
    filtered = [r for r in sampled if params[r].top_k > 1 or params[r].top_p < 1.0]
    for group, choose in ((plain, _choose_plain), (filtered, _choose_filtered)):
        if group:
            chosen = [params[r] for r in group]
            draws = [uniform(p.seed, positions[r]) for p, r in zip(chosen, group, strict=True)]
            index = torch.tensor(group, device=logits.device)
            tokens[index] = choose(_probabilities(copied(logits, group), chosen), chosen, _column(draws, logits))


def copied(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """A copy of some rows."""
    if logits.device.type == "cpu" and logits.dtype in _NUMPY_TYPES:
        return torch.from_numpy(logits.numpy()[list(rows)])  # eight times as fast as torch's
    return logits[torch.tensor(rows, device=logits.device)]


def uniform(seed: int, position: int) -> float:
    """A double in [0, 1) with 53 random bits, a pure function of (seed, position)."""
    key = _mix((seed + _WEYL) & _MASK)
    return (_mix((key + (position + 1) * _WEYL) & _MASK) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    """The splitmix64 finaliser: a bijection of 64 bits in which every input bit reaches every output bit."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def first_maximum(logits: torch.Tensor) -> torch.Tensor:
    """The token of the highest logit of every row, the first of equal ones: [R] int64."""
    if logits.device.type == "cpu" and logits.dtype in _NUMPY_TYPES:
        return torch.from_numpy(logits.numpy().argmax(axis=-1))  # ten times as fast as torch's
    return torch.argmax(logits, dim=-1)


def _probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """softmax(logits / temperature) in fp64, without what min_p cuts off.

    With the maximum moved to 0 first, no temperature is too small.
    """
    wide = logits.double()
    wide = (wide - wide.amax(-1, keepdim=True)) / _column([p.temperature for p in params], logits)
    probs = torch.softmax(wide, dim=-1)
    if any(p.min_p for p in params):
        min_p = _column([p.min_p for p in params], logits)
        left = probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0.0)
        probs = torch.where(min_p > 0, left / left.sum(-1, keepdim=True), probs)
    return probs


def _choose_plain(probs: torch.Tensor, _params: Sequence[SamplingParams], draws: torch.Tensor) -> torch.Tensor:
    return _invert(probs, draws)


def _choose_filtered(probs: torch.Tensor, params: Sequence[SamplingParams], draws: torch.Tensor) -> torch.Tensor:
    """Keep the top_k likeliest, of these the fewest whose share reaches top_p, then draw among them."""
    vocab = probs.shape[-1]
    top_k = torch.tensor([p.top_k or vocab for p in params], device=probs.device)[:, None]
    top_p = _column([p.top_p for p in params], probs)
    ranked, order = _rank(probs, min(_CANDIDATES, vocab))
    tokens, reached = _draw_ranked(ranked, order, top_k, top_p, draws)
    if ranked.shape[-1] < vocab:
        short = torch.nonzero(~reached)[:, 0]  # rows whose filter reaches beyond the candidates; decided row by row
        if len(short):
            ranked, order = _rank(probs[short], vocab)
            tokens[short], _ = _draw_ranked(ranked, order, top_k[short], top_p[short], draws[short])
    return tokens


def _rank(probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest of every row, likeliest first, equal ones by token id."""
    order = torch.topk(probs, count, dim=-1, sorted=False).indices.sort(dim=-1).values
    ranked, by_rank = torch.sort(probs.gather(-1, order), dim=-1, descending=True, stable=True)
    return ranked, order.gather(-1, by_rank)


def _draw_ranked(
    ranked: torch.Tensor, order: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, draws: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The drawn token of every row, and whether `ranked` surely held all that the filters let through.

    Not sure: the least candidate itself is let through, for tokens that are just as likely may stand behind it.
    """
    count = ranked.shape[-1]
    least = ranked[:, -1:]
    ranked = ranked.masked_fill(torch.arange(count, device=ranked.device) >= top_k, 0.0)
    running = ranked.cumsum(-1)
    total = torch.where(top_k <= count, running[:, -1:], 1.0)  # the mass that top_k lets through
    kept = ranked.masked_fill(running - ranked >= top_p * total, 0.0)  # the mass ahead of the first is 0: always kept
    reached = (least == 0) | ~(kept == least).any(-1, keepdim=True)
    return order.gather(-1, _invert(kept, draws)[:, None])[:, 0], reached[:, 0]


def _invert(probs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """First index at which the running sum exceeds draw * total; never one of probability zero."""
    running = probs.cumsum(-1)
    index = torch.searchsorted(running, draws * running[:, -1:], right=True)[:, 0]
    if probs.device.type == "cpu" and bool((index < probs.shape[-1]).all()):
        return index  # the sum grew there; only a target that was rounded up finds no index
    last = (probs > 0).to(torch.int8).cumsum(-1, dtype=torch.int64).argmax(-1)  # where the last positive one stands
    return torch.minimum(index, last)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
