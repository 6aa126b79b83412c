"""Adjustments: what changes logits before temperature, for many rows at once.

    mask  ->  forbidden tokens  ->  logit_bias  ->  repetition  ->  frequency  ->  presence penalty

Where a mask leaves nothing but tokens that are forbidden, these may come all the same.

Owns: the order, and the arithmetic in fp64; masks alone change nothing that fp64 could tell.
Does not: choose tokens, or know where the counts and masks come from.
Invariants: a row's result depends on that row alone; work is proportional to the different tokens of the penalised
sequences, never to their length times the vocabulary; rows without adjustments are not touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from cluster.core.sampling import SamplingParams
from worker.sampling.drawing import copied
from worker.sampling.row_extras import RowExtras

Mask = torch.Tensor  # [V] bool: True where a token may come

_NO_EXTRAS = RowExtras()


def changed_rows(extras: Sequence[RowExtras | None], masks: Sequence[Mask | None]) -> tuple[list[int], list[int]]:
    """The rows that are only masked, and those whose logits get other values.

    Both sequences may be empty, which says that no row has any.
    """
    adjusted = [r for r, extra in enumerate(extras) if extra is not None and extra.adjusts]
    others = set(adjusted)
    return [r for r, mask in enumerate(masks) if mask is not None and r not in others], adjusted


def widened(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """A copy of some rows in fp64."""
    return copied(logits, rows).double()


def adjust(
    logits: torch.Tensor,  # [R, V], fp64 where there is more than masks
    params: Sequence[SamplingParams],
    extras: Sequence[RowExtras | None],
    masks: Sequence[Mask | None] = (),
) -> None:
    """In place."""
    _mask(logits, masks)
    wanted = [extra or _NO_EXTRAS for extra in extras] or [_NO_EXTRAS] * len(params)
    _forbid(logits, wanted, masks)
    _add_bias(logits, params, wanted)
    _penalise(logits, params, wanted)


def _mask(logits: torch.Tensor, masks: Sequence[Mask | None]) -> None:
    masked = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
    if not masked:
        return
    allowed = torch.stack([mask for _, mask in masked]).to(logits.device)
    lowest = logits.new_tensor(-torch.inf)
    if len(masked) == len(logits):
        torch.where(allowed, logits, lowest, out=logits)  # three times as fast as masked_fill_
    else:
        index = torch.tensor([row for row, _ in masked], device=logits.device)
        logits[index] = torch.where(allowed, logits[index], lowest)


def _forbid(logits: torch.Tensor, extras: Sequence[RowExtras], masks: Sequence[Mask | None]) -> None:
    kept = {row for row, mask in enumerate(masks) if mask is not None and _allows_only(mask, extras[row].forbidden)}
    pairs = [(row, token) for row, extra in enumerate(extras) if row not in kept for token in extra.forbidden]
    if pairs:
        rows, tokens = torch.tensor(pairs, device=logits.device).T
        logits[rows, tokens] = -torch.inf


def _allows_only(mask: Mask, tokens: Iterable[int]) -> bool:
    ids = list(tokens)
    return bool(ids) and int(mask.sum()) == int(mask[ids].sum())


def _add_bias(logits: torch.Tensor, params: Sequence[SamplingParams], extras: Sequence[RowExtras]) -> None:
    biased = [row for row, extra in enumerate(extras) if extra.biased]
    pairs = [(row, token) for row in biased for token, _ in params[row].logit_bias]
    if pairs:
        values = [bias for row in biased for _, bias in params[row].logit_bias]
        rows, tokens = torch.tensor(pairs, device=logits.device).T
        logits[rows, tokens] += torch.tensor(values, dtype=torch.float64, device=logits.device)


def _penalise(logits: torch.Tensor, params: Sequence[SamplingParams], extras: Sequence[RowExtras]) -> None:
    """One gather and one scatter over all (row, token) pairs; a token appears once per row."""
    counted = [(row, extra.counts) for row, extra in enumerate(extras) if extra.counts is not None]
    if not counted:
        return
    sizes = [len(counts.ids) for _, counts in counted]
    on_cpu = logits.device.type == "cpu"

    def ready(values: Any) -> Any:
        return values if on_cpu else torch.from_numpy(values).to(logits.device)

    def per_pair(name: str) -> Any:
        return ready(np.repeat(np.array([getattr(params[row], name) for row, _ in counted], dtype=np.float64), sizes))

    begins = np.repeat([row * logits.shape[1] for row, _ in counted], sizes)
    places = ready(begins + np.concatenate([np.array(counts.ids) for _, counts in counted]))
    generated = ready(np.concatenate([np.array(counts.generated) for _, counts in counted]))
    repetition = per_pair("repetition_penalty")
    flat = logits.view(-1)
    numbers: Any = flat.numpy() if on_cpu else flat  # torch would share so little work among threads, and wait for them
    values = numbers[places]
    positive = values > 0
    values[positive] /= repetition[positive]
    values[~positive] *= repetition[~positive]
    values -= per_pair("frequency_penalty") * generated
    values -= per_pair("presence_penalty") * (generated > 0)
    numbers[places] = values
