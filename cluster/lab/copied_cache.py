"""CopiedCache: GrowingMemory whose copies really happen, with torch.cat on tensors of the model's KV.

Owns: one tensor (2, layers, KV heads, tokens, head dim) per request, the bytes copied and the seconds.
Does not: hold the KV that the model computes with (the engine's pool does), so only sizes matter here.
Invariants: the bytes are those of the tensors that were copied, not an estimate.
"""

from __future__ import annotations

import time

import torch

from cluster.lab.memory_policy import GrowingMemory
from cluster.lab.mixed_requests import MixedRequest
from worker.runner import ModelFacts


class CopiedCache(GrowingMemory):
    """Grows by one token, as a cache that concatenates does."""

    def __init__(self, budget: int, facts: ModelFacts) -> None:
        super().__init__(budget, lambda tokens: tokens)
        self._facts = facts
        self._tensors: dict[str, torch.Tensor] = {}
        self.copied_bytes = 0
        self.seconds = 0.0

    @property
    def bytes_held(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def admit(self, request: MixedRequest) -> bool:
        admitted = super().admit(request)
        if admitted:
            self._tensors[request.name] = self._zeros(request.prompt_tokens)
        return admitted

    def grow(self, name: str, tokens: int) -> bool:
        grown = super().grow(name, tokens)
        old = self._tensors[name]
        new = tokens - old.shape[3]
        if grown and new > 0:
            started = time.perf_counter()
            self._tensors[name] = torch.cat((old, self._zeros(new)), dim=3)
            self.seconds += time.perf_counter() - started
            self.copied_bytes += old.nbytes
        return grown

    def release(self, name: str) -> None:
        super().release(name)
        del self._tensors[name]

    def _zeros(self, tokens: int) -> torch.Tensor:
        facts = self._facts
        shape = (2, facts.num_layers, facts.num_kv_heads, tokens, facts.head_dim)
        return torch.zeros(shape, dtype=getattr(torch, facts.dtype))
