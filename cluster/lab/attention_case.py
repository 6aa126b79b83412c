"""AttentionCase: one layer's attention in a pool with several layers, block tables in random order, for any backend.

Owns: the queries, keys and values, the tables, and a pool that each backend has filled in its own layout.
Does not: time (quickest does) or choose backends.
Invariants: all backends of a case see the same numbers; the pool's layers are read in turn, so that what was just read
is not in the CPU's caches where a pool is larger than these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from worker.kernels.base import AttentionBackend, AttentionMetadata, SequenceSpan
from worker.kvcache.kv_pool import KvGeometry, KvPool

PLAIN_LAYOUT = "block,layer,kv,head,slot,dim"
LayerViews = Callable[[int], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseShape:
    """`rows` queries at the end of each of `sequences` sequences of `length` tokens."""

    sequences: int
    length: int
    rows: int
    block_size: int = 16
    layers: int = 4


class AttentionCase:
    def __init__(self, heads: HeadShape, shape: CaseShape, seed: int = 0) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        self.geometry = KvGeometry(
            num_layers=shape.layers,
            num_kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            block_size=shape.block_size,
            dtype=torch.float32,
        )
        per_sequence = -(-shape.length // shape.block_size)
        self.num_blocks = shape.sequences * per_sequence
        self.tables = torch.randperm(self.num_blocks, generator=generator).split(per_sequence)
        self._slots = self.num_blocks * shape.block_size

        def drawn(rows: int, count: int) -> torch.Tensor:
            return torch.randn(rows, count, heads.head_dim, generator=generator)

        self._keys, self._values = drawn(self._slots, heads.kv_heads), drawn(self._slots, heads.kv_heads)
        self._query = drawn(shape.sequences * shape.rows, heads.heads)
        self._scale = heads.head_dim**-0.5
        self._metadata = self._spans()

    @property
    def kv_bytes(self) -> int:
        """Of one layer: what a decode step has to read."""
        return self.shape.sequences * self.shape.length * self.geometry.bytes_per_token // self.shape.layers

    @property
    def row_bytes(self) -> int:
        """Of the queries, keys and values that come in, and of the answer."""
        rows = self._metadata.slot_mapping
        return 2 * self._query.nbytes + self._keys[rows].nbytes + self._values[rows].nbytes

    def pool(self) -> KvPool:
        return KvPool(self.geometry, self.num_blocks, torch.device("cpu"))

    def fill(self, backend: AttentionBackend, layer_kv: torch.Tensor) -> None:
        """Every slot, in the backend's layout. Where that is its own, it writes each block as a sequence by itself."""
        size, blocks = self.shape.block_size, self.num_blocks
        if backend.layout == PLAIN_LAYOUT:
            for half, rows in enumerate((self._keys, self._values)):
                layer_kv[:, half] = rows.view(blocks, size, *rows.shape[1:]).transpose(1, 2)
            return
        spans = tuple(
            SequenceSpan(row=block * size, count=size, start=0, block_table=torch.tensor([block]))
            for block in range(blocks)
        )
        metadata = AttentionMetadata(spans=spans, slot_mapping=torch.arange(self._slots))
        query = torch.zeros(self._slots, self._query.shape[1], self.geometry.head_dim)
        backend.forward(query, self._keys, self._values, layer_kv, metadata, scale=self._scale)

    def attend(self, backend: AttentionBackend, layer_kv: torch.Tensor) -> torch.Tensor:
        slots = self._metadata.slot_mapping
        keys, values = self._keys[slots], self._values[slots]
        return backend.forward(self._query, keys, values, layer_kv, self._metadata, scale=self._scale)

    def prepared(self, backend: AttentionBackend, views: LayerViews) -> Callable[[], torch.Tensor]:
        """Fill all layers, then attend in one after the other with every call."""
        for layer in range(self.shape.layers):
            self.fill(backend, views(layer))
        turn = 0

        def attend() -> torch.Tensor:
            nonlocal turn
            turn = (turn + 1) % self.shape.layers
            return self.attend(backend, views(turn))

        return attend

    def _spans(self) -> AttentionMetadata:
        shape, slots = self.shape, []
        spans = []
        for number, table in enumerate(self.tables):
            at = torch.arange(shape.length - shape.rows, shape.length)
            slots.append(table[at // shape.block_size] * shape.block_size + at % shape.block_size)
            spans.append(
                SequenceSpan(
                    row=number * shape.rows, count=shape.rows, start=shape.length - shape.rows, block_table=table
                )
            )
        return AttentionMetadata(spans=tuple(spans), slot_mapping=torch.cat(slots))


def quickest(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of the quickest call of each; they take turns, because other work on the machine only slows."""
    seconds = dict.fromkeys(works, float("inf"))
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return seconds
