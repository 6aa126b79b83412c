"""StepPlan: what the kernels of one step work on, the same for all its layers.

    spans          row | count | start | table_start | partial_start        one line per span
    tables         all block tables, one after another; a span's begins at table_start
    query_tiles    span | first query      long spans: prefill programs, the longest context first
    kv_tiles       span | tile             short spans: split programs; a span's begin at partial_start
    merge_rows     span | query            short spans: rows whose tiles are merged

A span is short when all its rows fit one split program; its KV is then shared out over programs.

Owns: the work lists and their one copy to the device.
Does not: know layers: a window that leaves out whole tiles is the kernels' concern.
Invariants: every row of every span is in exactly one query tile, or in exactly one merge row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.base import AttentionMetadata, SequenceSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    spans: Tensor  # [S, 5] int32
    tables: Tensor  # [blocks of all spans] int64
    query_tiles: Tensor  # [P, 2] int32
    kv_tiles: Tensor  # [D, 2] int32
    merge_rows: Tensor  # [R, 2] int32


def plan_step(
    metadata: AttentionMetadata, *, block_size: int, tile: int, queries_per_tile: int, most_short: int
) -> StepPlan:
    """Query tiles of `queries_per_tile`, and spans of up to `most_short` rows split into KV tiles of `tile` positions.

    The tensors are on the device of the block tables. Raises ValueError when a span does not fit its block table.
    """
    spans = [span for span in metadata.spans if span.count]
    _check_tables(spans, block_size)
    if not spans:
        nothing = torch.empty((0, 2), dtype=torch.int32)
        return StepPlan(spans=nothing, tables=nothing, query_tiles=nothing, kv_tiles=nothing, merge_rows=nothing)
    row, count, start, blocks = torch.tensor([(s.row, s.count, s.start, len(s.block_table)) for s in spans]).unbind(1)
    short = count <= most_short
    kv_tiles = torch.where(short, _ceil_div(start + count, tile), 0)
    lines = torch.stack((row, count, start, blocks.cumsum(0) - blocks, kv_tiles.cumsum(0) - kv_tiles), dim=1)
    queries = _numbered(torch.where(short, 0, _ceil_div(count, queries_per_tile)), queries_per_tile)
    seen = start[queries[:, 0]] + queries[:, 1]
    queries = queries[seen.argsort(descending=True, stable=True)]
    lists = (lines, queries, _numbered(kv_tiles), _numbered(torch.where(short, count, 0)))
    on_device = _to_device(lists, spans[0].block_table.device)
    return StepPlan(
        spans=on_device[0],
        tables=torch.cat([span.block_table for span in spans]),
        query_tiles=on_device[1],
        kv_tiles=on_device[2],
        merge_rows=on_device[3],
    )


def _check_tables(spans: list[SequenceSpan], block_size: int) -> None:
    for span in spans:
        if span.end > len(span.block_table) * block_size:
            raise ValueError(f"a span up to position {span.end} does not fit its block table ({len(span.block_table)})")


def _ceil_div(numbers: Tensor, by: int) -> Tensor:
    return (numbers + by - 1) // by


def _numbered(counts: Tensor, step: int = 1) -> Tensor:
    """[sum of counts, 2]: for every i, counts[i] lines (i, 0), (i, step), (i, 2 * step) and so on."""
    owner = torch.repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    return torch.stack((owner, (torch.arange(len(owner)) - first[owner]) * step), dim=1)


def _to_device(lists: tuple[Tensor, ...], device: torch.device) -> list[Tensor]:
    """As int32, in one copy."""
    flat = torch.cat([numbers.flatten() for numbers in lists]).int().to(device, non_blocking=True)
    parts = flat.split([numbers.numel() for numbers in lists])
    return [part.view(numbers.shape) for part, numbers in zip(parts, lists, strict=True)]
