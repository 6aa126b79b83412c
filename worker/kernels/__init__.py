"""Paged attention backends behind one protocol, and the one function that chooses among them.

Owns: select_backend.
Does not: probe devices or read the environment; the caller names the device.
Invariants: every choice is logged once, with the reason when a faster backend is not used.
"""

from __future__ import annotations

import logging

import torch

from cluster.core.errors import ConfigError
from worker.kernels import native
from worker.kernels.base import AttentionBackend
from worker.kernels.cpu import CpuAttention
from worker.kernels.cuda import select_on_cuda
from worker.kernels.reference import ReferenceAttention

logger = logging.getLogger(__name__)


def select_backend(
    device: str,
    wanted: str = "auto",
    threads: int = 1,
    block_size: int = 16,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> AttentionBackend:
    """The best backend for `device` ("cpu" or "cuda"), or `wanted` by name, else ConfigError.

    On cpu: cpu, reference.  On cuda: flash, triton, reference.
    """
    if wanted == "reference":
        return ReferenceAttention()
    home = {"cpu": "cpu", "flash": "cuda", "triton": "cuda"}.get(wanted, device)
    if home != device:
        raise ConfigError(f"attention backend {wanted} does not run on {device}")
    if device == "cuda":
        return select_on_cuda(wanted, block_size, head_dim, dtype)
    if native.instruction_set(block_size, head_dim) is not None:
        logger.info("attention backend: cpu")
        return CpuAttention(threads)
    reason = native.why_missing() or f"the native one does not fit block size {block_size}, head dim {head_dim}"
    if wanted == "cpu":
        raise ConfigError(f"attention backend cpu is not possible: {reason}")
    logger.warning("attention backend: reference, which is slow: %s", reason)
    return ReferenceAttention()
