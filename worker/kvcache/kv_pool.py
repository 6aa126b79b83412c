"""KvPool: the one tensor that holds the KV of every block of a replica.

    [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]        2: K, then V

A block is one contiguous piece of memory over all layers, so copying, exporting or importing it is one copy.
A layer is a strided view of it. The order of numbers inside [block_size, head_dim] is the attention backend's own.

Owns: the tensor, its geometry and its account in bytes.
Does not: know who uses a block (worker.kvcache.block_pool) or compute attention (worker.kernels).
Invariants: the geometry never changes; memory is not cleared, so a slot holds garbage until it is written.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGeometry:
    """What one token's KV looks like, and how many tokens a block holds."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.num_layers, self.num_kv_heads, self.head_dim, self.dtype.itemsize)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """K and V of one token over all layers."""
    return num_layers * 2 * num_kv_heads * head_dim * itemsize


class KvPool:
    """All blocks of one replica on one device."""

    def __init__(self, geometry: KvGeometry, num_blocks: int, device: torch.device) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        g = geometry
        shape = (num_blocks, g.num_layers, 2, g.num_kv_heads, g.block_size, g.head_dim)
        self.tensor = (
            _host_memory(shape, g.dtype) if device.type == "cpu" else torch.empty(shape, dtype=g.dtype, device=device)
        )

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.geometry.bytes_per_block

    def layer(self, index: int) -> torch.Tensor:
        """View of one layer: [num_blocks, 2, num_kv_heads, block_size, head_dim]."""
        return self.tensor[:, index]

    def copy_block(self, source: int, target: int) -> None:
        """All layers of `source` into `target`, in one copy."""
        self.tensor[target].copy_(self.tensor[source])


def _host_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Untouched pages, in huge pages where the system gives them: a pool takes memory as its blocks are used."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
