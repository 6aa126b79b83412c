"""OnDevice: a backend whose tensors are on another device, for a world whose tensors are on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from worker.kernels.base import AttentionBackend, AttentionMetadata, SequenceSpan


class OnDevice:
    """Strides stay as they are, and so does the pool's tensor."""

    def __init__(self, backend: AttentionBackend, device: torch.device) -> None:
        self.name, self.layout = backend.name, backend.layout
        self.backend, self.device = backend, device

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_kv: torch.Tensor,
        metadata: AttentionMetadata,
        **options: Any,
    ) -> torch.Tensor:
        layer = self.strided_copy(layer_kv)
        q, k, v = (x.to(self.device) for x in (query, key, value))
        out = self.backend.forward(q, k, v, layer, self.moved(metadata), **options).cpu()
        layer_kv.copy_(layer)
        return out

    def moved(self, metadata: AttentionMetadata) -> AttentionMetadata:
        return AttentionMetadata(
            tuple(SequenceSpan(s.row, s.count, s.start, s.block_table.to(self.device)) for s in metadata.spans),
            metadata.slot_mapping.to(self.device),
        )

    def strided_copy(self, view: torch.Tensor) -> torch.Tensor:
        """On the device, with all the memory that it is a view of; the tensor itself when it is there."""
        if view.device.type == self.device.type:
            return view
        base = torch.empty(0, dtype=view.dtype, device=self.device).set_(view.untyped_storage().to(device=self.device))
        return base.as_strided(view.shape, view.stride(), view.storage_offset())
