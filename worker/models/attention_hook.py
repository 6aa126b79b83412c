"""The seam between transformers' attention interface and our paged kernels.

transformers calls one registered function for every attention layer; the step object that decides what happens there
travels from `model(..., kvray_step=step)` down as a keyword argument.

Owns: the registered name and function, and two kinds of step: PagedStep computes, ProbeStep records the calls.
Does not: load models or judge what was recorded (worker.models.transformers_backend).
Invariants: an argument that would change the attention's result is either honoured or refused, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cluster.core.errors import ConfigError
from worker.kernels.base import AttentionBackend, AttentionMetadata
from worker.kvcache.kv_pool import KvPool

ATTENTION_NAME = "kvray_paged"
_HARMLESS_TENSORS = frozenset({"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """One layer's attention call over T rows."""

    layer: int
    query: torch.Tensor  # [T, num_heads, head_dim]
    key: torch.Tensor  # [T, num_kv_heads, head_dim]
    value: torch.Tensor  # [T, num_kv_heads, head_dim]
    scale: float
    sliding_window: int | None
    softcap: float | None


class AttentionStep(Protocol):
    def attend(self, call: LayerCall) -> torch.Tensor:  # [T, num_heads, head_dim]
        ...


class PagedStep:
    """Attention over the pool, for one batch."""

    def __init__(self, pool: KvPool, backend: AttentionBackend, metadata: AttentionMetadata) -> None:
        self._pool = pool
        self._backend = backend
        self._metadata = metadata

    def attend(self, call: LayerCall) -> torch.Tensor:
        return self._backend.forward(
            call.query,
            call.key,
            call.value,
            self._pool.layer(call.layer),
            self._metadata,
            scale=call.scale,
            sliding_window=call.sliding_window,
            softcap=call.softcap,
        )


class ProbeStep:
    """Keeps every call and answers zeros; run once at load to learn what the model will ask for."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []

    def attend(self, call: LayerCall) -> torch.Tensor:
        self.calls.append(call)
        return call.query.new_zeros((*call.query.shape[:2], call.value.shape[2]))


def register() -> None:
    """Make `attn_implementation="kvray_paged"` known to transformers; doing it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, T, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, T, head_dim]
    value: torch.Tensor,  # [1, num_kv_heads, T, head_dim]
    attention_mask: torch.Tensor | None,
    *,
    kvray_step: AttentionStep | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls; returns [1, T, num_heads, head_dim]."""
    if kvray_step is None:
        raise ConfigError(f"{type(module).__name__} does not receive the keyword arguments of the model's forward")
    scale = options.pop("scaling", None)
    window, softcap = options.pop("sliding_window", None), options.pop("softcap", None)
    _refuse_unknown(module, attention_mask, options)
    call = LayerCall(
        layer=int(module.layer_idx),  # type: ignore[arg-type]  # an int on every attention layer of transformers
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
        sliding_window=window,
        softcap=softcap,
    )
    return kvray_step.attend(call)[None], None


def _refuse_unknown(module: torch.nn.Module, attention_mask: torch.Tensor | None, options: dict[str, Any]) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise ConfigError(f"{name} builds its own attention mask")
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ConfigError(f"{name} is not causal")
    for option, given in options.items():
        if isinstance(given, torch.Tensor) and option not in _HARMLESS_TENSORS:
            raise ConfigError(f"{name} passes {option!r} to its attention, which paged attention does not know")
