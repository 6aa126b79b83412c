"""select_on_cuda: the attention backend for a CUDA device, flash before triton before reference.

Owns: the order of preference there, and the one log line with the reasons against the faster ones.
Does not: import a GPU package before it is asked, or probe devices itself.
Invariants: a backend that was asked for by name is given or refused with its reason, never replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from cluster.core.errors import ConfigError
from worker.kernels import triton as triton_kernels
from worker.kernels.base import AttentionBackend
from worker.kernels.flash.backend import FlashAttention
from worker.kernels.flash.installed import FoundFlash, find_flash
from worker.kernels.flash.slot_writer import KvWriter, write_kv
from worker.kernels.reference import ReferenceAttention

logger = logging.getLogger(__name__)


def select_on_cuda(
    wanted: str,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    find: Callable[[], FoundFlash] = find_flash,
) -> AttentionBackend:
    """`wanted` is "auto", "flash" or "triton"; ConfigError when the named one is not possible."""
    reasons = []
    for name in ("flash", "triton") if wanted == "auto" else (wanted,):
        backend, detail = _flash(block_size, head_dim, dtype, find) if name == "flash" else _triton()
        if backend is not None:
            logger.info("attention backend: %s%s", name, f" ({detail})" if detail else "")
            return backend
        if wanted != "auto":
            raise ConfigError(f"attention backend {name} is not possible: {detail}")
        reasons.append(f"no {name}: {detail}")
    logger.warning("attention backend: reference; it is correct but slow on cuda; %s", "; ".join(reasons))
    return ReferenceAttention()


def _flash(
    block_size: int, head_dim: int, dtype: torch.dtype, find: Callable[[], FoundFlash]
) -> tuple[AttentionBackend | None, str]:
    """The backend and where it comes from, or None and the reason."""
    found = find()
    reason = found.why_not(block_size, head_dim, dtype)
    if found.call is None or reason is not None:
        return None, reason or found.reason
    return FlashAttention(found.call, _writer()), found.call.origin


def _triton() -> tuple[AttentionBackend | None, str]:
    reason = triton_kernels.why_missing()
    return (None, reason) if reason else (triton_kernels.triton_attention(), "")


def _writer() -> KvWriter:
    """One kernel where Triton is there, a few launches of torch's otherwise."""
    return write_kv if triton_kernels.why_missing() else triton_kernels.kv_writer()
