"""Sampling one row at a time in plain Python floats: slow, and meant to be read beside the definitions."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from cluster.core.sampling import SamplingParams
from worker.sampling.drawing import uniform


def adjusted(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
    *,
    forbidden: Collection[int] = (),
    mask: Sequence[bool] | None = None,
) -> list[float]:
    """The logits after everything that comes before temperature."""
    changed = list(logits)
    for token in range(len(changed)):
        if (mask is not None and not mask[token]) or token in forbidden:
            changed[token] = -math.inf
    for token, bias in params.logit_bias:
        changed[token] += bias
    for token in {*prompt, *answer}:
        value, count = changed[token], answer.count(token)
        value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * count
        value -= params.presence_penalty * (1 if count else 0)
        changed[token] = value
    return changed


def distribution(logits: Sequence[float], params: SamplingParams) -> list[tuple[int, float]]:
    """The tokens that may come, in the order in which the draw goes through them, with their probabilities."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.greedy or params.top_k == 1:
        return [(ranked[0], 1.0)]
    top = logits[ranked[0]]
    mass = {token: math.exp((logits[token] - top) / params.temperature) for token in ranked}
    kept = [token for token in ranked if mass[token] >= params.min_p * mass[ranked[0]] and mass[token] > 0]
    if params.top_k or params.top_p < 1.0:
        kept = kept[: params.top_k or len(kept)]
        total, ahead, nucleus = math.fsum(mass[token] for token in kept), 0.0, []
        for token in kept:
            if ahead >= params.top_p * total:
                break
            nucleus.append(token)
            ahead += mass[token]
        kept = nucleus
    else:
        kept.sort()
    total = math.fsum(mass[token] for token in kept)
    return [(token, mass[token] / total) for token in kept]


def sampled(logits: Sequence[float], params: SamplingParams, position: int) -> int:
    """`logits` are adjusted ones."""
    chances = distribution(logits, params)
    target, running = uniform(params.seed, position), 0.0
    for token, probability in chances:
        running += probability
        if running > target:
            return token
    return chances[-1][0]


def log_softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    total = top + math.log(math.fsum(math.exp(value - top) for value in logits))
    return [value - total for value in logits]
