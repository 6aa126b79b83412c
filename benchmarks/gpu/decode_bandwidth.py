"""Section `bandwidth`: KV bytes that decode attention reads per second, beside a plain copy on the same device.

Decode attention does little with each number, so that the device's memory is what limits it. The KV is made so large
that a copy of it would take a millisecond: no cache holds it, and starting the kernels takes a small part of the time.

Owns: the sizes, and the copy that everything is a share of.
Does not: measure a model step (benchmarks.gpu.throughput).
Invariants: only KV is counted, read once; what the kernels write and merge makes them slower, not better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.environment import GpuEnvironment, Skip
from benchmarks.gpu.report import Row
from worker.kernels import select_backend
from worker.kernels.base import AttentionMetadata, SequenceSpan
from worker.kvcache.kv_pool import KvGeometry, KvPool
from worker.model_runner import free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    contexts: tuple[int, ...] = (1024, 16384)
    copy_bytes: int = 2 << 30
    copy_seconds: float = 1e-3  # the KV is what a copy reads in this time
    most_share: float = 0.25  # of the free memory, for the copy and for the KV


def bandwidth(environment: GpuEnvironment, sizes: Sizes | None = None) -> Iterator[Row]:
    sizes = sizes or Sizes()
    copied = copy_rate(environment, sizes)
    yield Row("copy", "ok", f"{copied / 1e9:,.0f} GB/s read and written")
    for setup in environment.fast_setups():
        if setup.cuda_graphs:
            continue
        for context in sizes.contexts:
            share = partial(_share, environment, sizes, setup.backend, context, copied)
            yield environment.attempt(f"{setup}, contexts of {context:,}", share)


def copy_rate(environment: GpuEnvironment, sizes: Sizes) -> float:
    """Bytes per second, read and written counted both."""
    size = min(sizes.copy_bytes, int(sizes.most_share * free_bytes(environment.device)) // 2)
    source = torch.ones(size, dtype=torch.uint8, device=environment.device)
    target = torch.empty_like(source)
    return 2 * size / environment.median_seconds(lambda: target.copy_(source))


def _share(environment: GpuEnvironment, sizes: Sizes, backend: str, context: int, copied: float) -> str:
    step = DecodeStep(environment, sizes, backend, context, int(copied * sizes.copy_seconds))
    seconds = environment.median_seconds(step.run)
    rate = step.kv_bytes / seconds
    return (
        f"{rate / 1e9:,.0f} GB/s of KV, {rate / copied:.0%} of the copy "
        f"({step.sequences:,} sequences, {seconds * 1e3:.2f} ms)"
    )


class DecodeStep:
    """One layer's attention of one new token for each of many sequences, with scattered blocks of random KV."""

    def __init__(self, environment: GpuEnvironment, sizes: Sizes, backend: str, context: int, kv_bytes: int) -> None:
        device, dtype = environment.device, getattr(torch, environment.half)
        self._kernel = select_backend(device.type, backend, 1, sizes.block_size, sizes.head_dim, dtype)
        geometry = KvGeometry(
            num_layers=1,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            block_size=sizes.block_size,
            dtype=dtype,
        )
        limit = int(sizes.most_share * free_bytes(device))
        self.sequences = min(kv_bytes, limit) // (geometry.bytes_per_token * context)
        if not self.sequences:
            raise Skip(f"{limit:,} bytes hold no sequence of {context:,} tokens")
        self.kv_bytes = self.sequences * context * geometry.bytes_per_token
        blocks = -(-context // sizes.block_size)
        pool = KvPool(geometry, self.sequences * blocks, device)
        self._layer = pool.layer(0).normal_()
        self._metadata = _metadata(self.sequences, blocks, context, device, sizes.block_size)
        rows = [(self.sequences, heads, sizes.head_dim) for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]
        self._rows = [torch.randn(shape, device=device, dtype=dtype) for shape in rows]
        self._scale = sizes.head_dim**-0.5

    def run(self) -> torch.Tensor:
        query, key, value = self._rows
        return self._kernel.forward(query, key, value, self._layer, self._metadata, scale=self._scale)


def _metadata(sequences: int, blocks: int, context: int, device: torch.device, block_size: int) -> AttentionMetadata:
    order = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(0)).to(device)
    tables = order.view(sequences, blocks)
    last = context - 1
    return AttentionMetadata(
        spans=tuple(
            SequenceSpan(row=row, count=1, start=last, block_table=table) for row, table in enumerate(tables.unbind())
        ),
        slot_mapping=tables[:, last // block_size] * block_size + last % block_size,
    )
