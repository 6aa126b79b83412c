"""StepRun: several sequences through one executor and one poisoned pool, every row's logits kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.kvcache.kv_pool import KvGeometry, KvPool
from worker.models.executor import Executor, RowSpan, StepRows

SPARE_BLOCKS = 2


def make_pool(executor: Executor, num_blocks: int, block_size: int, fill: float = float("nan")) -> KvPool:
    geometry = KvGeometry(
        num_layers=executor.geometry.num_layers,
        num_kv_heads=executor.geometry.num_kv_heads,
        head_dim=executor.geometry.head_dim,
        block_size=block_size,
        dtype=executor.dtype,
    )
    pool = KvPool(geometry, num_blocks, torch.device("cpu"))
    pool.tensor.fill_(fill)
    return pool


class StepRun:
    """Sequence i has blocks for capacities[i] tokens, scattered over the pool."""

    def __init__(
        self, executor: Executor, capacities: Sequence[int], block_size: int = 16, fill: float = float("nan")
    ) -> None:
        sizes = [-(-capacity // block_size) for capacity in capacities]
        order = torch.randperm(sum(sizes) + SPARE_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        self.tables = [order[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
        self.spare = order[sum(sizes) :]
        self.lengths = [0] * len(sizes)
        self.pool = make_pool(executor, len(order), block_size, fill)
        self._executor = executor

    @torch.inference_mode()
    def step(self, parts: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """The next tokens of some sequences; per part the logits of all its rows, fp32 [rows, vocab_size]."""
        spans = [RowSpan(len(tokens), self.lengths[i], self.tables[i]) for i, tokens in parts]
        rows = StepRows([t for _, tokens in parts for t in tokens], spans, range(sum(s.rows for s in spans)))
        logits = self._executor.compute(rows, self.pool).float().clone()
        for i, tokens in parts:
            self.lengths[i] += len(tokens)
        return list(logits.split([span.rows for span in spans]))

    def feed(self, tokens: Sequence[int], sequence: int = 0) -> torch.Tensor:
        return self.step([(sequence, tokens)])[0]

    def feed_in_pieces(self, tokens: Sequence[int], piece: int) -> torch.Tensor:
        return torch.cat([self.feed(tokens[begin : begin + piece]) for begin in range(0, len(tokens), piece)])
