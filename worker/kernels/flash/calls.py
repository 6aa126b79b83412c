"""One adapter per signature of flash_attn_varlen_func.

    vllm-flash-attn 2.6.2    key lengths as cu_seqlens_k, also with a block table
    inside vLLM              key lengths as seqused_k, cu_seqlens_k is forbidden then; fa_version chooses the kernel

Owns: which argument carries what, and choosing the adapter by the function's parameter names.
Does not: import a package (worker.kernels.flash.installed) or check sizes (worker.kernels.flash.limits).
Invariants: everything goes by name; the result is what the function returns, never an `out` argument, which 2.6.2 does
not fill when it regroups the heads of decode rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch

from cluster.core.errors import ConfigError
from worker.kernels.flash.step import FlashStep

VarlenFunction = Callable[..., torch.Tensor]
KeyLengths = Callable[[FlashStep], dict[str, torch.Tensor]]

_KEY_LENGTHS: dict[str, KeyLengths] = {
    "cu_seqlens_k": lambda step: {"cu_seqlens_k": step.cu_seqlens_k},
    "seqused_k": lambda step: {"seqused_k": step.seqused_k},
}
_LENGTHS = ("cu_seqlens_q", "max_seqlen_q", "max_seqlen_k")
_ALWAYS = frozenset(("q", "k", "v", "softmax_scale", "causal", "window_size", "block_table", *_LENGTHS))


class FlashCall(Protocol):
    origin: str  # package and version, for logs
    supports_softcap: bool

    def __call__(
        self,
        query: torch.Tensor,  # [T, num_heads, head_dim]
        k_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        v_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        step: FlashStep,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:  # [T, num_heads, head_dim]
        """Attend causally; query and caches have the same dtype."""


class VarlenCall:
    """`key_lengths`: the argument that says how long each sequence is; `fixed`: what never changes."""

    def __init__(self, function: VarlenFunction, origin: str, key_lengths: KeyLengths, fixed: dict[str, Any]) -> None:
        self.origin = origin
        self.supports_softcap = "softcap" in inspect.signature(function).parameters
        self._function, self._key_lengths, self._fixed = function, key_lengths, fixed

    def __call__(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        step: FlashStep,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        return self._function(
            q=query,
            k=k_cache,
            v=v_cache,
            cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_q=step.max_seqlen_q,
            max_seqlen_k=step.max_seqlen_k,
            softmax_scale=scale,
            causal=True,
            window_size=(window - 1, 0) if window else (-1, -1),  # keys before a query's own, and after it
            block_table=step.block_table,
            **self._key_lengths(step),
            **({"softcap": softcap} if softcap else {}),
            **self._fixed,
        )


def adapt(function: VarlenFunction, origin: str, fa_version: int | None = None) -> FlashCall:
    """ConfigError when the function is none that we know. `fa_version` None: the function's own choice."""
    names = set(inspect.signature(function).parameters)
    lengths = "seqused_k" if "seqused_k" in names else "cu_seqlens_k"
    fixed = {} if fa_version is None else {"fa_version": fa_version}
    if missing := sorted(_ALWAYS.union((lengths,), fixed) - names):
        raise ConfigError(f"flash_attn_varlen_func of {origin} has no parameter {', '.join(missing)}")
    return VarlenCall(function, origin, _KEY_LENGTHS[lengths], fixed)
