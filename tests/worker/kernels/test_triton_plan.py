"""The work lists of a step, the sizes of programs, and the package without triton. Nothing here imports triton."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.kernels.base import AttentionMetadata, SequenceSpan
from worker.kernels.fixed_metadata import FixedMetadata
from worker.kernels.triton import why_missing
from worker.kernels.triton.fixed_plan import plan_fixed
from worker.kernels.triton.step_plan import StepPlan, plan_step
from worker.kernels.triton.tile_shape import TILE, tile_shape

BLOCK = 16


def plan_of(lengths: list[tuple[int, int]], queries_per_tile: int = 21, most_short: int = 5) -> StepPlan:
    """Of spans (start, count); the blocks of all sequences are numbered through."""
    spans, row, block = [], 0, 0
    for start, count in lengths:
        blocks = -(-(start + count) // BLOCK) + 1 if count else 0
        spans.append(SequenceSpan(row, count, start, torch.arange(block, block + blocks)))
        row, block = row + count, block + blocks
    metadata = AttentionMetadata(tuple(spans), torch.arange(row))
    return plan_step(metadata, block_size=BLOCK, tile=TILE, queries_per_tile=queries_per_tile, most_short=most_short)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 60)), max_size=8),
    queries_per_tile=st.integers(1, 64),
    most_short=st.integers(1, 16),
)
def test_every_row_is_computed_once_over_all_its_tiles(
    lengths: list[tuple[int, int]], queries_per_tile: int, most_short: int
) -> None:
    plan = plan_of(lengths, queries_per_tile, most_short)
    spans = plan.spans.tolist()
    rows = [spans[span][0] + query for span, query in plan.merge_rows.tolist()]
    for span, first in plan.query_tiles.tolist():
        row, count, *_ = spans[span]
        rows += [row + query for query in range(first, min(first + queries_per_tile, count))]
    assert sorted(rows) == list(range(sum(count for _, count in lengths)))

    assert len(spans) == sum(count > 0 for _, count in lengths)
    for row, count, start, table_start, partial_start in spans:
        assert plan.tables[table_start] == table_start
        if count <= most_short:
            tiles = range(-(-(start + count) // TILE))
            assert plan.kv_tiles[partial_start : partial_start + len(tiles), 1].tolist() == list(tiles)
            owners = {spans[i][0] for i in plan.kv_tiles[partial_start : partial_start + len(tiles), 0].tolist()}
            assert owners == {row}


def test_the_longest_context_comes_first() -> None:
    plan = plan_of([(0, 100), (500, 50), (90, 30)])
    last = [int(plan.spans[span, 2]) + first for span, first in plan.query_tiles.tolist()]
    assert len(last) == 5 + 3 + 2
    assert all(a >= b for a, b in pairwise(last))


def test_a_table_that_is_too_short_is_refused() -> None:
    span = SequenceSpan(row=0, count=2, start=15, block_table=torch.tensor([3]))
    metadata = AttentionMetadata((span,), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"position 17 does not fit its block table \(1\)"):
        plan_step(metadata, block_size=BLOCK, tile=TILE, queries_per_tile=8, most_short=4)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (4, 16), (8, 100)])
def test_a_plan_of_fixed_shape_is_that_of_the_same_step(rows: int, width: int) -> None:
    starts = torch.linspace(0, width * BLOCK - 1, rows).long()
    tables = torch.arange(rows * width).view(rows, width)
    fixed = plan_fixed(FixedMetadata((), starts, starts, tables), block_size=BLOCK, tile=TILE)
    spans = tuple(SequenceSpan(b, 1, start, tables[b]) for b, start in enumerate(starts.tolist()))
    made = plan_step(AttentionMetadata(spans, starts), block_size=BLOCK, tile=TILE, queries_per_tile=8, most_short=1)
    assert torch.equal(fixed.spans[:, :4], made.spans[:, :4])
    assert torch.equal(fixed.tables, made.tables)
    assert torch.equal(fixed.merge_rows, made.merge_rows)
    assert len(fixed.query_tiles) == len(made.query_tiles) == 0
    partials = fixed.spans[made.kv_tiles[:, 0], 4] + made.kv_tiles[:, 1]
    assert torch.equal(fixed.kv_tiles[partials], made.kv_tiles)
    assert len(fixed.kv_tiles) == rows * -(-width * BLOCK // TILE)
    for found, wanted in zip(lists_of(fixed), lists_of(made), strict=True):
        assert (found.dtype, found.is_contiguous()) == (wanted.dtype, True)


def lists_of(plan: StepPlan) -> list[torch.Tensor]:
    return [plan.spans, plan.tables, plan.query_tiles, plan.kv_tiles, plan.merge_rows]


def test_a_plan_of_fixed_shape_reads_no_number_on_the_host() -> None:
    positions, tables = torch.empty(4, dtype=torch.int64, device="meta"), torch.empty(4, 9, device="meta").long()
    plan = plan_fixed(FixedMetadata((), positions, positions, tables), block_size=BLOCK, tile=TILE)
    assert {numbers.device.type for numbers in lists_of(plan)} == {"meta"}  # where a look at a number raises


@pytest.mark.parametrize("group", [1, 3, 8, 17, 128])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_sizes_fit_products_and_tiles(group: int, head_dim: int, itemsize: int) -> None:
    shape = tile_shape(group, head_dim, itemsize)
    assert shape.step == tile_shape(1, head_dim, itemsize).step
    assert TILE % shape.step == 0
    assert min(shape.step, shape.decode_rows) >= 16
    assert shape.prefill_rows >= shape.decode_rows >= group


@pytest.mark.parametrize(("group", "head_dim"), [(129, 64), (1, 257)])
def test_sizes_that_do_not_fit_are_refused(group: int, head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"{group} heads per KV head of head dim {head_dim}"):
        tile_shape(group, head_dim, 2)


def test_without_triton_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "triton cannot be imported" in why_missing()


def test_the_kernels_package_does_not_import_triton() -> None:
    code = "import sys, worker.kernels, worker.kernels.triton.step_plan; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
