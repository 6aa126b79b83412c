"""TorchExecutor: a model made of torch operations, with one of the paged attention backends.

Owns: turning a step into tensors and attention metadata.
Does not: know which model it runs (Decoder or TransformersModel) or which backend.
Invariants: as worker.models.executor.Executor.
"""

from __future__ import annotations

from typing import Protocol

import torch

from worker.kernels.base import AttentionBackend, AttentionMetadata, SequenceSpan
from worker.kvcache.kv_pool import KvPool
from worker.models.attention_hook import AttentionStep, PagedStep
from worker.models.executor import StepRows
from worker.models.model_card import ModelProperties


class TorchModel(ModelProperties, Protocol):
    device: torch.device

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor: ...


class TorchExecutor:
    def __init__(self, model: TorchModel, backend: AttentionBackend) -> None:
        self._model, self._backend = model, backend
        self.attention, self.kv_layout = backend.name, backend.layout
        self.dtype, self.weight_bytes, self.geometry = model.dtype, model.weight_bytes, model.geometry
        self.vocab_size, self.model_limit = model.vocab_size, model.model_limit
        self.eos_token_ids, self.rope_parameters = model.eos_token_ids, model.rope_parameters

    def compute(self, rows: StepRows, pool: KvPool) -> torch.Tensor:
        device, block_size = self._model.device, pool.geometry.block_size
        spans, slots, positions = [], [], []
        row = 0
        for count, start, block_ids in rows.spans:
            table = torch.tensor(block_ids, dtype=torch.int64)
            at = torch.arange(start, start + count)
            slots.append(table[at // block_size] * block_size + at % block_size)
            positions.append(at)
            spans.append(SequenceSpan(row=row, count=count, start=start, block_table=table.to(device)))
            row += count
        metadata = AttentionMetadata(spans=tuple(spans), slot_mapping=torch.cat(slots).to(device))
        return self._model.forward(
            torch.tensor(rows.token_ids, device=device),
            torch.cat(positions).to(device),
            torch.tensor(rows.logit_rows, dtype=torch.int64, device=device),
            PagedStep(pool, self._backend, metadata),
        )
