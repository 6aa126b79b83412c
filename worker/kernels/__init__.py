"""Paged attention backends behind one protocol, and the one function that chooses among them.

Owns: select_backend.
Does not: probe devices or read the environment; the caller names the device.
Invariants: every choice is logged once, with the reason when a faster backend is not used.
"""

from __future__ import annotations

import logging

from worker.kernels.base import AttentionBackend
from worker.kernels.reference import ReferenceAttention

logger = logging.getLogger(__name__)


def select_backend(device: str) -> AttentionBackend:
    """The best backend for `device` ("cpu" or "cuda")."""
    if device == "cuda":
        logger.warning("attention backend: reference; it is correct but slow on cuda, no GPU kernel is built in")
    else:
        logger.info("attention backend: reference")
    return ReferenceAttention()
