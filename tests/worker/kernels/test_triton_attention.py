"""The Triton kernels against a full softmax: interpreted on the CPU, or compiled where there is a CUDA device.

Triton decides when it is imported whether kernels are interpreted. So this file says it before the import and takes it
back after, and imports triton afresh when something else has imported it already.
"""

from __future__ import annotations

import itertools
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import native_kernels
import numpy as np
import on_device
import pytest
import torch
import torch.nn.functional as F
from attention_world import AttentionWorld, Part
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.kernels.base import AttentionMetadata, SequenceSpan
from worker.kernels.fixed_metadata import FixedMetadata
from worker.kernels.reference import ReferenceAttention

ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if ON_GPU else []

with pytest.MonkeyPatch.context() as patch:
    if not ON_GPU:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in list(sys.modules):
            if f"{name}.".startswith(("triton.", "worker.kernels.triton.")) and not name.startswith("triton._C"):
                del sys.modules[name]
    triton = pytest.importorskip("triton")
    import triton.language as tl

    from worker.kernels.triton.addressing import slot_offset
    from worker.kernels.triton.attention import TritonAttention
    from worker.kernels.triton.block_copy import copy_blocks
    from worker.kernels.triton.kv_write import write_kv

    @triton.jit  # type: ignore[untyped-decorator]
    def offsets_kernel(out_ptr, blocks_ptr, strides, N: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
        i = tl.arange(0, N)
        tl.store(out_ptr + i, slot_offset(tl.load(blocks_ptr + i), i % 2, i % 4, strides))


F32, BF16, F16 = native_kernels.DTYPES
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
LONG = bool(os.environ.get("KVRAY_LONG"))
PLAIN, ROUNDED = 2e-5, 2e-2  # ROUNDED: the weights of the softmax or the outputs are 16 bits wide


class OnDevice(on_device.OnDevice):
    def __init__(self) -> None:
        super().__init__(TritonAttention(), DEVICE)


class FixedShape(OnDevice):
    """Gives the backend a decode step as FixedMetadata, with padding rows and wider tables than needed."""

    def __init__(self, padding: int = 1, spare_blocks: int = 17) -> None:
        super().__init__()
        self.padding, self.spare_blocks = padding, spare_blocks

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **o: Any
    ) -> torch.Tensor:
        nothing = [torch.full((self.padding, *x.shape[1:]), float("nan"), dtype=x.dtype) for x in (query, key, value)]
        q, k, v = (torch.cat(pair) for pair in zip((query, key, value), nothing, strict=True))
        return super().forward(q, k, v, *rest, **o)[: len(query)]

    def moved(self, metadata: AttentionMetadata) -> AttentionMetadata:
        tables = [span.block_table for span in metadata.spans] + [torch.tensor([0])] * self.padding
        width = max(map(len, tables)) + self.spare_blocks
        return FixedMetadata(
            spans=(),
            slot_mapping=F.pad(metadata.slot_mapping, (0, self.padding), value=-1).to(DEVICE),
            positions=F.pad(torch.tensor([s.start for s in metadata.spans]), (0, self.padding)).to(DEVICE),
            block_tables=torch.stack([F.pad(table, (0, width - len(table))) for table in tables]).to(DEVICE),
        )


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not ON_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # the interpreter imports more of triton when it first runs
    torch.set_num_threads(1)
    with native_kernels.poisoned_memory():
        yield


def step_of(spans: Sequence[tuple[int, int]], **options: Any) -> tuple[AttentionWorld, list[Part]]:
    """A world in which the cached part of every (cached, new) is written, and the parts of the step."""
    world = AttentionWorld([cached + new for cached, new in spans], **options)
    if before := [(s, 0, cached) for s, (cached, _) in enumerate(spans) if cached]:
        world.run(ReferenceAttention(), before, rows=world.dtype)
    return world, [(s, cached, cached + new) for s, (cached, new) in enumerate(spans)]


# (cached, new) of every sequence of a step. Edges of blocks, steps and tiles; pieces and single rows.
RAGGED = [(0, 1), (0, 17), (12, 4), (250, 70), (256, 1)]
DECODES = [(0, 1), (15, 1), (255, 1), (511, 1), (250, 7)]

# dtype, type of the rows, heads, KV heads, head dim, block size, window, softcap, the step
CASES: list[tuple[Any, ...]] = [
    (F32, F32, 3, 1, 64, 16, None, None, RAGGED),
    (F32, F32, 2, 2, 80, 8, 37, None, RAGGED),
    (F32, F32, 8, 1, 96, 64, None, 2.0, DECODES),
    (F32, F32, 7, 1, 128, 32, 300, None, DECODES),
    (F32, F32, 1, 1, 256, 256, 1, None, RAGGED),
    (BF16, BF16, 3, 1, 64, 16, 300, None, RAGGED),
    (BF16, F32, 14, 2, 80, 32, None, 2.0, [(0, 3), (300, 1)]),
    (BF16, BF16, 2, 2, 96, 8, 7, None, RAGGED),
    (BF16, BF16, 8, 1, 128, 64, None, None, DECODES),
    (F16, F16, 8, 1, 64, 8, 255, 2.0, DECODES),
    (F16, F16, 3, 1, 96, 32, None, None, RAGGED),
    (F16, F16, 2, 2, 128, 16, 16, None, DECODES),
    (F16, F32, 20, 1, 8, 24, None, None, [(0, 3), (260, 40)]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(part) for part in case[:8]))
def test_equals_full_softmax_and_the_reference(case: Any) -> None:
    dtype, rows, heads, kv_heads, head_dim, block_size, window, softcap, spans = case
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    world, parts = step_of(spans, dtype=dtype, window=window, softcap=softcap, **sizes)
    outputs = world.run(OnDevice(), parts, rows=rows)
    tolerance = PLAIN if rows == F32 else ROUNDED
    assert {out.dtype for out in outputs} == {rows}
    assert world.largest_error(parts, outputs) < tolerance
    written = world.pool.clone()
    if rows == dtype:
        expected = world.run(ReferenceAttention(), parts, rows=rows)
        torch.testing.assert_close(torch.cat(outputs), torch.cat(expected), atol=tolerance, rtol=tolerance)
        assert torch.equal(world.pool.nan_to_num(9.0), written.nan_to_num(9.0))
    assert world.pool[:, 0].isnan().all()
    assert world.layer[world.spare].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (F32, {}),
        (F32, {"window": 40, "block_size": 8}),
        (F16, {"window": 300, "softcap": 3.0, "heads": 7, "kv_heads": 1}),
        (BF16, {"head_dim": 80, "block_size": 48}),
    ],
)
def test_a_step_of_fixed_shape_has_the_same_bits(dtype: torch.dtype, options: dict[str, Any]) -> None:
    world, parts = step_of([(0, 1), (15, 1), (255, 1), (300, 1)], dtype=dtype, **options)
    before = world.pool.clone()
    wanted = world.run(OnDevice(), parts, rows=dtype)
    written = world.pool.clone()
    for backend in (FixedShape(), FixedShape(padding=0, spare_blocks=0)):
        world.pool.copy_(before)
        found = world.run(backend, parts, rows=dtype)
        assert torch.equal(torch.cat(found), torch.cat(wanted))
        assert torch.equal(world.pool.nan_to_num(9.0), written.nan_to_num(9.0))


def test_a_plan_of_fixed_shape_follows_its_inputs_and_nothing_else() -> None:
    backend, world = TritonAttention(), AttentionWorld([300, 300], heads=2)
    world.run(ReferenceAttention(), world.whole())
    layer = world.layer.to(DEVICE)
    inputs = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    tables = torch.stack(world.tables).to(DEVICE)
    for positions in ([5, 299], [299, 30], [0, 0]):
        at = torch.tensor(positions)
        slots = [int(world.tables[s][p // 16]) * 16 + p % 16 for s, p in enumerate(positions)]
        inputs[0], inputs[1] = at.to(DEVICE), torch.tensor(slots, device=DEVICE)
        picked = ([x[s][p] for s, p in enumerate(positions)] for x in (world.q, world.k, world.v))
        q, k, v = (torch.stack(rows).to(DEVICE) for rows in picked)
        step = FixedMetadata(spans=(), slot_mapping=inputs[1], positions=inputs[0], block_tables=tables)
        out = backend.forward(q, k, v, layer, step, scale=world.scale).cpu()
        parts = [(s, p, p + 1) for s, p in enumerate(positions)]
        assert world.largest_error(parts, list(out[:, None])) < PLAIN


@settings(max_examples=200 if ON_GPU and LONG else 12)  # on a device, most of them compile anew
@given(
    spans=st.lists(
        st.tuples(st.sampled_from([0, 0, 1, 15, 16, 63, 255, 256, 257]) | st.integers(0, 300), st.integers(1, 20)),
        min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from([(1, 1), (4, 2), (2, 2), (7, 1), (17, 1)]),
    head_dim=st.sampled_from([8, 16, 24, 64, 80]),
    block_size=st.sampled_from([1, 8, 16, 48, 512]),
    dtype=st.sampled_from(native_kernels.DTYPES),
    window=st.none() | st.integers(1, 300),
    softcap=st.none() | st.just(4.0),
)
def test_random_mixes_of_spans(
    spans: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
) -> None:
    sizes = {"heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim, "block_size": block_size}
    world, parts = step_of(spans, dtype=dtype, window=window, softcap=softcap, **sizes)
    assert world.largest_error(parts, world.run(OnDevice(), parts)) < PLAIN
    assert world.layer[world.spare].isnan().all()


@pytest.mark.parametrize("dtype", native_kernels.DTYPES)
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    spans = [(0, 1), (300, 1), (20, 30), (255, 3)]
    world, parts = step_of(spans, dtype=dtype, heads=4, kv_heads=1)
    for part, row in zip(parts, world.run(OnDevice(), parts, rows=dtype), strict=True):
        assert torch.equal(world.run(OnDevice(), [part], rows=dtype)[0], row)


def dot_row_by_row(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    """The interpreter's product, but a row's bits depend on that row only, which the BLAS does not promise."""
    product = np.einsum("mk,kn->mn", a.data, b.data, dtype=d.data.dtype, casting="same_kind", optimize=False)
    return type(d)(product + d.data, d.dtype.scalar)


@pytest.mark.skipif(ON_GPU, reason="nothing is promised about products of different row counts on tensor cores")
@pytest.mark.parametrize(("dtype", "window"), [(F32, None), (F16, 40)])
def test_the_order_of_sums_depends_on_kv_positions_only(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = type(triton.runtime.interpreter.interpreter_builder)
    monkeypatch.setattr(builder, "create_dot", dot_row_by_row)
    world = AttentionWorld([330], dtype=dtype, window=window, heads=3, kv_heads=1)
    (whole,) = world.run(OnDevice(), world.whole(), rows=dtype)
    world.poison()
    cuts = [0, 1, 14, 15, 200, 256, 257, 259, 330]
    pieces = [world.run(OnDevice(), [(0, a, b)], rows=dtype)[0] for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(pieces), whole)


def test_queries_keys_and_values_may_be_slices_and_the_pool_any_view() -> None:
    world, parts = step_of([(0, 5), (40, 2), (9, 30)])
    shape = (len(world.pool), 2, world.block_size, world.kv_heads, world.head_dim)
    world.layer = torch.full(shape, float("nan")).transpose(2, 3).copy_(world.layer)  # slots before heads
    fused = torch.randn(37, 10, 16, device=DEVICE)
    outputs = world.run(Sliced(fused), parts)
    assert world.largest_error(parts, outputs) < PLAIN


class Sliced(OnDevice):
    """Gives the backend its rows as slices of one tensor."""

    def __init__(self, fused: torch.Tensor) -> None:
        super().__init__()
        self.fused = fused

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **o: Any
    ) -> torch.Tensor:
        self.fused.copy_(torch.cat((query, key, value), dim=1))
        return super().forward(*self.fused.split([6, 2, 2], dim=1), *rest, **o)


def test_a_step_without_rows() -> None:
    world = AttentionWorld([5])
    empty = torch.empty(0, 6, 16), torch.empty(0, 2, 16), torch.empty(0, 2, 16)
    slots = torch.empty(0, dtype=torch.int64)
    for spans in ((), (SequenceSpan(row=0, count=0, start=0, block_table=world.tables[0]),)):
        out = OnDevice().forward(*empty, world.layer, AttentionMetadata(spans, slots), scale=1.0)
        assert out.shape == (0, 6, 16)
    assert world.pool.isnan().all()


@pytest.mark.parametrize(
    ("options", "rows", "reason"),
    [
        ({"head_dim": 264}, F32, "head dim 264"),
        ({"heads": 129, "kv_heads": 1}, F32, "129 heads"),
        ({"dtype": torch.float64}, F32, "float64"),
        ({}, torch.float64, "float64"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(options: Any, rows: torch.dtype, reason: str) -> None:
    world = AttentionWorld([5], **options)
    with pytest.raises(ValueError, match=reason):
        world.run(OnDevice(), world.whole(), rows=rows)
    assert world.pool.isnan().all()


def test_a_short_table_and_a_pool_without_dense_rows_are_refused() -> None:
    world = AttentionWorld([17])
    world.tables[0] = world.tables[0][:1]
    rows = world.q[0], world.k[0], world.v[0]
    metadata = AttentionMetadata((SequenceSpan(0, 17, 0, world.tables[0]),), torch.arange(17))
    with pytest.raises(ValueError, match="does not fit its block table"):
        OnDevice().forward(*rows, world.layer, metadata, scale=1.0)
    with pytest.raises(ValueError, match="stride"):
        OnDevice().forward(*rows, world.layer.transpose(3, 4), metadata, scale=1.0)
    assert world.pool.isnan().all()


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_offsets_have_64_bits(ids: torch.dtype) -> None:
    strides = (2**20, 2**19, 2**18, 128)
    blocks = torch.tensor([0, 1, 2047, 2048, 4096, 70_000, 2**21, 2**30], dtype=ids, device=DEVICE)
    out = torch.empty(8, dtype=torch.int64, device=DEVICE)
    offsets_kernel[(1,)](out, blocks, strides, N=8)
    expected = [b * strides[0] + i % 2 * strides[2] + i % 4 * strides[3] for i, b in enumerate(blocks.tolist())]
    assert expected[-1] > 2**49
    assert out.tolist() == expected


def huge_pool() -> torch.Tensor:
    """More than 2^31 numbers, of which the CPU holds only the pages that are touched."""
    shape = (2**15 + 8, 2, 2, 64, 256)
    if ON_GPU:
        return torch.zeros(shape, dtype=BF16, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, 2 * torch.Size(shape).numel(), flags=flags)
    return torch.frombuffer(memory, dtype=BF16).view(shape)


def test_blocks_beyond_2_to_the_31_numbers() -> None:
    layer = huge_pool()
    near, far = len(layer) - 1, len(layer) - 3
    assert far * layer.stride(0) > 2**31
    key = torch.randn(1, 2, 256, device=DEVICE).to(BF16)
    write_kv(key, -key, layer, torch.tensor([far * 64 + 5], device=DEVICE))
    assert torch.equal(layer[far, :, :, 5], torch.cat((key, -key)))
    copy_blocks(layer, torch.tensor([far], device=DEVICE), torch.tensor([near], device=DEVICE))
    assert torch.equal(layer[near], layer[far])
    row = SequenceSpan(row=0, count=1, start=0, block_table=torch.tensor([near], device=DEVICE))
    metadata = AttentionMetadata((row,), torch.tensor([near * 64], device=DEVICE))
    out = TritonAttention().forward(key.repeat(1, 2, 1), key, -key, layer, metadata, scale=0.1)
    torch.testing.assert_close(out, -key.repeat_interleave(2, 1), atol=1e-2, rtol=1e-2)
    assert not layer[0].any()


@pytest.mark.parametrize("dtype", [*native_kernels.DTYPES, torch.uint8])
def test_blocks_are_copied_bit_for_bit(dtype: torch.dtype) -> None:
    shape = (9, 2, 2, 3, 4, 24)
    size = torch.Size(shape).numel() * dtype.itemsize
    pool = torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape).to(DEVICE)  # with NaNs
    expected = pool.view(torch.uint8).clone()
    copy_blocks(pool, torch.tensor([1, 1, 5], device=DEVICE), torch.tensor([8, 0, 2], device=DEVICE))
    expected[8], expected[0], expected[2] = expected[1], expected[1], expected[5]
    assert torch.equal(pool.view(torch.uint8), expected)
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    copy_blocks(pool, nothing, nothing)
    assert torch.equal(pool.view(torch.uint8), expected)
    with pytest.raises(ValueError, match="not contiguous"):
        copy_blocks(pool.transpose(1, 2), nothing, nothing)


def test_one_step_makes_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[TritonAttention.__module__]
    plan_step = Mock(wraps=vars(module)["plan_step"])
    monkeypatch.setattr(module, "plan_step", plan_step)
    backend, table = TritonAttention(), torch.tensor([0], device=DEVICE)
    layer = torch.zeros(1, 2, 1, 16, 16, device=DEVICE)
    row = torch.zeros(1, 1, 16, device=DEVICE)
    for _ in range(2):
        metadata = AttentionMetadata((SequenceSpan(0, 1, 0, table),), table)
        for _ in range(3):
            backend.forward(row, row, row, layer, metadata, scale=1.0)
    assert plan_step.call_count == 2
