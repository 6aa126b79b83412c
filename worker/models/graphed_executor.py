"""GraphedExecutor: a TorchExecutor that replays a captured graph for the steps in which every sequence decodes.

A decode step launches hundreds of small kernels, which takes the host longer than the device needs for them. A graph
launches them all at once. It is captured for a bucket of 1, 2, 4, 8, ... rows when the first such step comes, and holds
tables for MOST_POSITIONS; rows that are missing are padding.

Owns: the buckets, their graphs, and which steps they fit.
Does not: capture by itself (worker.models.graph_capture) or know kernels.
Invariants: as worker.models.executor.Executor; every other step is computed as by TorchExecutor. Logits come from a
product with as many rows as the bucket, so their last bits may differ from a smaller one's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cluster.core.errors import ConfigError
from worker.kernels.base import AttentionBackend
from worker.kvcache.kv_pool import KvPool
from worker.models.attention_hook import PagedStep
from worker.models.decode_inputs import DecodeInputs
from worker.models.executor import StepRows
from worker.models.graph_capture import Capture, Work
from worker.models.torch_executor import TorchExecutor, TorchModel

MOST_POSITIONS = 8192  # behind these, attention takes longer than its launches; each row costs programs for all of them
GRAPH_BACKENDS = ("triton",)  # those that take FixedMetadata


def require_graphs(device: str, not_lean: str | None) -> None:
    """ConfigError when no model of that kind can be captured there. `not_lean`: why the lean decoder cannot run it."""
    if device != "cuda":
        raise ConfigError(f"CUDA graphs need a CUDA device, and the device is {device}")
    if not_lean is not None:
        raise ConfigError(f"CUDA graphs need kvray's own decoder, which cannot run this model: {not_lean}")


def bucket_of(rows: int) -> int:
    """The least power of two that holds them."""
    return 1 << (rows - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: DecodeInputs
    replay: Work


class GraphedExecutor(TorchExecutor):
    def __init__(self, model: TorchModel, backend: AttentionBackend, capture: Capture, *, most_rows: int) -> None:
        """`most_rows`: a step with more rows is never captured. ConfigError for a backend that cannot be captured."""
        super().__init__(model, backend)
        if backend.name not in GRAPH_BACKENDS:
            choice = " or ".join(GRAPH_BACKENDS)
            raise ConfigError(f"CUDA graphs need attention backend {choice}, and it is {backend.name}")
        self._capture, self._most_rows = capture, most_rows
        self._graphs: dict[int, _Graph] = {}
        self._pool: KvPool | None = None

    def compute(self, rows: StepRows, pool: KvPool) -> torch.Tensor:
        if not self._fits(rows):
            return super().compute(rows, pool)
        if pool is not self._pool:  # graphs hold addresses
            self._graphs.clear()
            self._pool = pool
        bucket = bucket_of(len(rows.spans))
        if bucket not in self._graphs:
            self._graphs[bucket] = self._captured(bucket, pool)
        graph = self._graphs[bucket]
        graph.inputs.fill(rows)
        return graph.replay()[: len(rows.spans)]

    def _fits(self, rows: StepRows) -> bool:
        count, most_positions = len(rows.spans), min(self.model_limit, MOST_POSITIONS)
        return (
            0 < count <= self._most_rows
            and all(span.rows == 1 and span.start < most_positions for span in rows.spans)
            and list(rows.logit_rows) == list(range(count))
        )

    def _captured(self, bucket: int, pool: KvPool) -> _Graph:
        block_size = pool.geometry.block_size
        width = -(-min(self.model_limit, MOST_POSITIONS) // block_size)
        inputs = DecodeInputs(bucket, width, block_size, self._model.device)

        def work() -> torch.Tensor:
            step = PagedStep(pool, self._backend, inputs.metadata())
            return self._model.forward(inputs.token_ids, inputs.positions, inputs.logit_rows, step)

        return _Graph(inputs, self._capture(work))
