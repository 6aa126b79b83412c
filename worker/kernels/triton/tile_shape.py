"""How much one program holds: query rows, KV positions of one product, warps and pipeline stages.

Owns: these sizes for every head dim, group and type, and the limits of the backend.
Does not: compile; that the shared memory of a common size fits every device is checked by the tests.
Invariants: the KV side (TILE, step) does not depend on the query side, so that prefill and decode add in one order.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE = 256  # KV positions that are summed up together, as in every backend
MOST_GROUP = 128  # heads that share a KV head
MOST_HEAD_DIM = 256
LEAST_DOT = 16  # rows, columns and depth of the smallest product on tensor cores


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    prefill_rows: int  # queries x group
    decode_rows: int
    step: int  # KV positions of one product
    prefill_warps: int
    decode_warps: int
    stages: int


def padded(size: int) -> int:
    """The power of two that holds `size`, and that a product accepts."""
    return max(LEAST_DOT, 1 << (size - 1).bit_length())


def tile_shape(group: int, head_dim: int, itemsize: int) -> TileShape:
    """For `group` heads per KV head and products of numbers of `itemsize` bytes.

    Raises ValueError beyond MOST_GROUP or MOST_HEAD_DIM.
    """
    if group > MOST_GROUP or head_dim > MOST_HEAD_DIM:
        raise ValueError(f"no triton attention for {group} heads per KV head of head dim {head_dim}")
    step = min(64, 16384 // (padded(head_dim) * itemsize))  # K and V of a step: two stages of 16 KiB each at most
    decode_rows = padded(group)
    return TileShape(
        prefill_rows=max(step * 2 if itemsize == 2 else step, decode_rows),
        decode_rows=decode_rows,
        step=step,
        prefill_warps=8,
        decode_warps=8 if decode_rows > 64 else 4,
        stages=2,
    )
