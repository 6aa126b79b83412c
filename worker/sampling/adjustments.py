"""Adjustments: what changes logits before temperature, for many rows at once.

    mask  ->  forbidden tokens  ->  logit_bias  ->  repetition  ->  frequency  ->  presence penalty

Owns: the order, and the arithmetic in fp64.
Does not: choose tokens, or know where the counts and masks come from.
Invariants: a row's result depends on that row alone; work is proportional to the different tokens of the penalised
sequences, never to their length times the vocabulary; rows without adjustments are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cluster.core.sampling import SamplingParams
from worker.sampling.row_extras import RowExtras

Mask = torch.Tensor  # [V] bool: True where a token may come

_NO_EXTRAS = RowExtras()


def adjusted_rows(extras: Sequence[RowExtras | None], masks: Sequence[Mask | None]) -> list[int]:
    """The rows whose logits change. Both sequences may be empty, which says that no row has any."""
    rows = {r for r, extra in enumerate(extras) if extra is not None and extra.adjusts}
    rows |= {r for r, mask in enumerate(masks) if mask is not None}
    return sorted(rows)


def widened(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """A copy of some rows in fp64."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy()[rows].astype(np.float64))
    return logits[torch.tensor(rows, device=logits.device)].double()


def adjust(
    logits: torch.Tensor,  # [R, V] fp64
    params: Sequence[SamplingParams],
    extras: Sequence[RowExtras | None],
    masks: Sequence[Mask | None] = (),
) -> None:
    """In place."""
    _mask(logits, masks)
    wanted = [extra or _NO_EXTRAS for extra in extras]
    _forbid(logits, wanted)
    _add_bias(logits, params, wanted)
    _penalise(logits, params, wanted)


def _mask(logits: torch.Tensor, masks: Sequence[Mask | None]) -> None:
    masked = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
    if masked:
        index = torch.tensor([row for row, _ in masked], device=logits.device)
        forbidden = ~torch.stack([mask for _, mask in masked]).to(logits.device)
        logits[index] = logits[index].masked_fill(forbidden, -torch.inf)


def _forbid(logits: torch.Tensor, extras: Sequence[RowExtras]) -> None:
    pairs = [(row, token) for row, extra in enumerate(extras) for token in extra.forbidden]
    if pairs:
        rows, tokens = torch.tensor(pairs, device=logits.device).T
        logits[rows, tokens] = -torch.inf


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
