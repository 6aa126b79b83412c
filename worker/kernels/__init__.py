"""Paged attention backends behind one protocol, and the one function that chooses among them.

Owns: select_backend.
Does not: probe devices or read the environment; the caller names the device.
Invariants: every choice is logged once, with the reason when a faster backend is not used.
"""

from __future__ import annotations

import logging

from cluster.core.errors import ConfigError
from worker.kernels import native
from worker.kernels.base import AttentionBackend
from worker.kernels.cpu import CpuAttention
from worker.kernels.reference import ReferenceAttention

logger = logging.getLogger(__name__)


def select_backend(
    device: str, wanted: str = "auto", threads: int = 1, block_size: int = 16, head_dim: int = 64
) -> AttentionBackend:
    """The best backend for `device` ("cpu" or "cuda"), or `wanted` by name ("cpu", "reference"), else ConfigError."""
    if wanted == "reference":
        return ReferenceAttention()
    if wanted == "cpu" and device == "cuda":
        raise ConfigError("attention backend cpu does not run on cuda")
    if device == "cuda":
        logger.warning("attention backend: reference; it is correct but slow on cuda, no GPU kernel is built in")
        return ReferenceAttention()
    if native.instruction_set(block_size, head_dim) is not None:
        logger.info("attention backend: cpu")
        return CpuAttention(threads)
    reason = native.why_missing() or f"the native one does not fit block size {block_size}, head dim {head_dim}"
    if wanted == "cpu":
        raise ConfigError(f"attention backend cpu is not possible: {reason}")
    logger.warning("attention backend: reference, which is slow: %s", reason)
    return ReferenceAttention()
