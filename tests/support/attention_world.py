"""AttentionWorld: random sequences over one poisoned pool, for any attention backend, with a full softmax to check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.kernels.base import AttentionBackend, AttentionMetadata, SequenceSpan

SPARE_BLOCKS = 3
NAN = float("nan")

Part = tuple[int, int, int]  # sequence, and the positions [start, end) that a step computes


@dataclass
class AttentionWorld:
    """Queries, keys and values are fp32 numbers that `dtype` holds exactly, so that only arithmetic makes errors."""

    lengths: Sequence[int]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    seed: int = 7

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        sizes = [-(-length // self.block_size) for length in self.lengths]
        order = torch.randperm(sum(sizes) + SPARE_BLOCKS, generator=generator)
        self.tables = list(order[: sum(sizes)].split(sizes))
        self.spare = order[sum(sizes) :]

        def rows(heads: int) -> list[torch.Tensor]:
            shapes = [(length, heads, self.head_dim) for length in self.lengths]
            return [torch.randn(shape, generator=generator).to(self.dtype).float() for shape in shapes]

        self.q, self.k, self.v = rows(self.heads), rows(self.kv_heads), rows(self.kv_heads)
        self.scale = 1.3 * self.head_dim**-0.5
        self.poison()

    def poison(self) -> None:
        """A pool of two layers in which nothing is written yet; the sequences are in the second."""
        shape = (len(self.spare) + sum(map(len, self.tables)), 2, 2, self.kv_heads, self.block_size, self.head_dim)
        self.pool = torch.full(shape, NAN, dtype=self.dtype)
        self.layer = self.pool[:, 1]

    def run(
        self, backend: AttentionBackend, parts: Sequence[Part], rows: torch.dtype = torch.float32
    ) -> list[torch.Tensor]:
        """One step; the KV before each part's start must be in the pool. `rows` is the type of q, k and v."""
        spans, slots, row = [], [], 0
        for sequence, start, end in parts:
            table, at = self.tables[sequence], torch.arange(start, end)
            slots.append(table[at // self.block_size] * self.block_size + at % self.block_size)
            spans.append(SequenceSpan(row=row, count=end - start, start=start, block_table=table))
            row += end - start
        q, k, v = (torch.cat([x[s][a:b] for s, a, b in parts]).to(rows) for x in (self.q, self.k, self.v))
        metadata = AttentionMetadata(spans=tuple(spans), slot_mapping=torch.cat(slots))
        out = backend.forward(
            q, k, v, self.layer, metadata, scale=self.scale, sliding_window=self.window, softcap=self.softcap
        )
        return list(out.split([end - start for _, start, end in parts]))

    def whole(self) -> list[Part]:
        return [(sequence, 0, length) for sequence, length in enumerate(self.lengths)]

    def oracle(self, sequence: int, start: int, end: int) -> torch.Tensor:
        """Full softmax in fp64 for the positions [start, end): [end - start, heads, head_dim]."""
        group = self.heads // self.kv_heads
        q = self.q[sequence][start:end].double().transpose(0, 1)
        k, v = (x[sequence][:end].double().transpose(0, 1).repeat_interleave(group, 0) for x in (self.k, self.v))
        scores = q @ k.transpose(1, 2) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        distance = torch.arange(start, end)[:, None] - torch.arange(end)[None, :]
        hidden = (distance < 0) | (distance >= (self.window or end))
        return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)

    def largest_error(self, parts: Sequence[Part], outputs: Sequence[torch.Tensor]) -> float:
        """Against the oracle, over all parts; NaN when an output has one."""
        errors = [(out - self.oracle(*part)).abs().max() for part, out in zip(parts, outputs, strict=True)]
        return float(torch.stack(errors).max())
