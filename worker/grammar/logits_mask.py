"""Logits mask: bitmasks of allowed tokens as the masks that the sampler takes.

Owns: the unpacking of bits on the logits' device.
Does not: change logits (worker.sampling.adjustments) or compute bitmasks (worker.grammar.mask_set).
Invariants: ids beyond a bitmask are not allowed; no loop over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from worker.grammar.vocabulary import Bitmask


def allowed_tokens(masks: Sequence[Bitmask], size: int, device: torch.device) -> torch.Tensor:
    """[len(masks), size] bool: True where a token may come. At least one mask."""
    packed = np.stack(masks)
    allowed = _unpacked_on_cpu(packed) if device.type == "cpu" else _unpacked_on_device(packed, device)
    missing = max(0, size - allowed.shape[-1])
    return torch.nn.functional.pad(allowed, (0, missing)) if missing else allowed[:, :size]


def _unpacked_on_cpu(packed: Bitmask) -> torch.Tensor:
    """[len(packed), 32 * words] bool; numpy unpacks bits twenty times as fast as torch."""
    bits = np.unpackbits(packed.view(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(bits).view(torch.bool)


def _unpacked_on_device(packed: Bitmask, device: torch.device) -> torch.Tensor:
    """The same, where the packed bits travel and are unpacked over there."""
    octets = torch.from_numpy(packed.view(np.uint8)).to(device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    return ((octets[..., None] >> shifts) & 1).view(len(packed), -1) == 1
