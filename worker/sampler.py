"""Sampler: from logits to token ids, all rows at once.

A sampled row draws exactly one number u in [0, 1) from its own (seed, position), and takes the first token at which the
cumulated probability exceeds u. So a seeded answer does not depend on batching, preemption or caching.

Owns: temperature, top-k, top-p, greedy choice, the counter-based random number, and the log probabilities.
Does not: keep state between steps or decide when a request ends.
Invariants: a row's token depends on its logits, its parameters and its position only, never on other rows;
top_k = 1 is greedy; probabilities are fp64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.core.sampling import SamplingParams

_MASK = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15
_CANDIDATES = 1024  # ranking the whole vocabulary is eight times slower and hardly ever needed


class Sampler:
    def sample(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> list[int]:  # logits: [R, V]
        """One token id per row; `positions[r]` is the position of the token being chosen."""
        tokens = _first_maximum(logits)
        sampled = [r for r, p in enumerate(params) if not p.greedy and p.top_k != 1]
        plain = [r for r in sampled if params[r].top_k == 0 and params[r].top_p == 1.0]
        filtered = [r for r in sampled if params[r].top_k > 1 or params[r].top_p < 1.0]
        for rows, choose in ((plain, _choose_plain), (filtered, _choose_filtered)):
            if rows:
                chosen = [params[r] for r in rows]
                draws = [uniform(p.seed, positions[r]) for p, r in zip(chosen, rows, strict=True)]
                index = torch.tensor(rows, device=logits.device)
                tokens[index] = choose(_probabilities(logits[index], chosen), chosen, _column(draws, logits))
        return [int(token) for token in tokens.tolist()]

    def logprobs(self, logits: torch.Tensor, tokens: Sequence[int], wanted: Sequence[bool]) -> list[float]:
        """Log probability of each row's token where it is wanted, else 0; fp32, as transformers computes it."""
        values = [0.0] * len(tokens)
        rows = [r for r, want in enumerate(wanted) if want]
        if rows:
            index = torch.tensor(rows, device=logits.device)
            ids = torch.tensor([tokens[r] for r in rows], device=logits.device)
            chosen = torch.log_softmax(logits[index].float(), dim=-1).gather(-1, ids[:, None])[:, 0]
            for row, value in zip(rows, chosen.tolist(), strict=True):
                values[row] = value
        return values

    def candidates(self, logits: torch.Tensor, counts: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
        """The `counts[r]` likeliest next tokens of each row with their log probabilities, best first."""
        found: list[tuple[tuple[int, float], ...]] = [()] * len(counts)
        rows = [r for r, count in enumerate(counts) if count]
        if rows:
            index = torch.tensor(rows, device=logits.device)
            logprobs = torch.log_softmax(logits[index].float(), dim=-1)
            best = torch.topk(logprobs, min(max(counts), logits.shape[-1]), dim=-1)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            for row, (ids, values) in zip(rows, pairs, strict=True):
                found[row] = tuple(zip(ids, values, strict=True))[: counts[row]]
        return found


def uniform(seed: int, position: int) -> float:
    """A double in [0, 1) with 53 random bits, a pure function of (seed, position)."""
    key = _mix((seed + _WEYL) & _MASK)
    return (_mix((key + (position + 1) * _WEYL) & _MASK) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    """The splitmix64 finaliser: a bijection of 64 bits in which every input bit reaches every output bit."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _first_maximum(logits: torch.Tensor) -> torch.Tensor:
    """The token of the highest logit of every row, the first of equal ones: [R] int64."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy().argmax(axis=-1))  # ten times as fast as torch's
    return torch.argmax(logits, dim=-1)


def _probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """softmax(logits / temperature) in fp64; with the maximum moved to 0 first, no temperature is too small."""
    wide = logits.double()
    wide = (wide - wide.amax(-1, keepdim=True)) / _column([p.temperature for p in params], logits)
    return torch.softmax(wide, dim=-1)


def _choose_plain(probs: torch.Tensor, _params: Sequence[SamplingParams], draws: torch.Tensor) -> torch.Tensor:
    return _invert(probs, draws)


def _choose_filtered(probs: torch.Tensor, params: Sequence[SamplingParams], draws: torch.Tensor) -> torch.Tensor:
    """Keep the top_k likeliest, of these the fewest whose share reaches top_p, then draw among them."""
    vocab = probs.shape[-1]
    top_k = torch.tensor([p.top_k or vocab for p in params], device=probs.device)[:, None]
    top_p = _column([p.top_p for p in params], probs)
    ranked, order = _rank(probs, min(_CANDIDATES, vocab))
    tokens, reached = _draw_ranked(ranked, order, top_k, top_p, draws)
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
    """The drawn token of every row, and whether `ranked` held all that the filters let through."""
    count = ranked.shape[-1]
    ranked = ranked.masked_fill(torch.arange(count, device=ranked.device) >= top_k, 0.0)
    running = ranked.cumsum(-1)
    total = torch.where(top_k <= count, running[:, -1:], 1.0)  # the mass that top_k lets through
    kept = ranked.masked_fill(running - ranked >= top_p * total, 0.0)  # the mass ahead of the first is 0: always kept
    reached = (top_k <= count) | (running[:, -1:] >= top_p)
    return order.gather(-1, _invert(kept, draws)[:, None])[:, 0], reached[:, 0]


def _invert(probs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """First index at which the running sum exceeds draw * total; never one of probability zero."""
    running = probs.cumsum(-1)
    index = torch.searchsorted(running, draws * running[:, -1:], right=True)[:, 0]
    last = (probs > 0).to(torch.int8).cumsum(-1, dtype=torch.int64).argmax(-1)  # where the last positive one stands
    return torch.minimum(index, last)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
