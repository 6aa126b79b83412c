"""plan_fixed: the StepPlan of a FixedMetadata, made on the device without a word from the host.

    kv_tiles    every tile that the block tables could hold, for every row; programs behind a row's end leave at once
    partials    those of row b begin at b * tiles

Owns: the work lists of fixed size.
Does not: change the kernels: they take the bounds of their work from the spans, which lie in device memory.
Invariants: every shape depends on the shapes of the metadata only; a row gets the bits that plan_step gives it.
"""

from __future__ import annotations

import torch

from worker.kernels.fixed_metadata import FixedMetadata
from worker.kernels.triton.step_plan import StepPlan


def plan_fixed(metadata: FixedMetadata, *, block_size: int, tile: int) -> StepPlan:
    """Only launches, nothing that waits, so that it can be captured; it must run again in every step."""
    rows, width = metadata.block_tables.shape
    tiles = -(-width * block_size // tile)
    row = torch.arange(rows, device=metadata.positions.device)
    one, tile_numbers = torch.ones_like(row), torch.arange(tiles, device=row.device)
    spans = torch.stack((row, one, metadata.positions, row * width, row * tiles), dim=1)
    kv_tiles = torch.stack((row[:, None].expand(rows, tiles), tile_numbers.expand(rows, tiles)), dim=2)
    return StepPlan(
        spans=spans.int(),
        tables=metadata.block_tables.flatten(),
        query_tiles=torch.empty((0, 2), dtype=torch.int32, device=row.device),
        kv_tiles=kv_tiles.flatten(0, 1).int(),
        merge_rows=torch.stack((row, torch.zeros_like(row)), dim=1).int(),
    )
