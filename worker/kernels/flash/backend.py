"""FlashAttention: prefill pieces and decode rows in one flash_attn_varlen_func call, directly on the paged pool.

Owns: the order of a layer's work: check, write the new KV, attend over strided views of the pool.
Does not: find the package (worker.kernels.flash.installed) or know its signature (worker.kernels.flash.calls).
Invariants: no copy of KV; what is refused writes nothing; the step's tensors are built once for all layers. That a row
has the same bits in every batch is not promised.
"""

from __future__ import annotations

import torch

from cluster.core.errors import ConfigError
from worker.kernels.base import AttentionMetadata
from worker.kernels.flash.calls import FlashCall
from worker.kernels.flash.limits import why_not_layer
from worker.kernels.flash.slot_writer import KvWriter, write_kv
from worker.kernels.flash.step import FlashStep
from worker.kernels.reference import ReferenceAttention


class FlashAttention:
    name = "flash"
    layout = ReferenceAttention.layout

    def __init__(self, call: FlashCall, write: KvWriter = write_kv) -> None:
        self._call, self._write = call, write
        self._of: AttentionMetadata | None = None  # held, so that no later step can be taken for this one
        self._step: FlashStep | None = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_kv: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        if not metadata.spans:
            return torch.empty_like(query)
        step = self._step_of(metadata, len(query), layer_kv)
        if softcap and not self._call.supports_softcap:
            raise ConfigError(f"attention backend flash: {self._call.origin} has no softcap, which this model needs")
        self._write(key, value, layer_kv, metadata.slot_mapping)
        k_cache, v_cache = (layer_kv[:, which].transpose(1, 2) for which in (0, 1))
        out = self._call(
            query.to(layer_kv.dtype), k_cache, v_cache, step, scale=scale, window=sliding_window, softcap=softcap
        )
        return out.to(query.dtype)

    def _step_of(self, metadata: AttentionMetadata, num_rows: int, layer_kv: torch.Tensor) -> FlashStep:
        if self._step is None or self._of is not metadata:
            if (reason := why_not_layer(layer_kv)) is not None:
                raise ConfigError(f"attention backend flash is not possible: {reason}")
            self._step = FlashStep.build(metadata, num_rows, layer_kv.shape[3])
            self._of = metadata
        return self._step
