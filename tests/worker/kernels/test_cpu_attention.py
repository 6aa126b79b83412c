"""Native attention against a full softmax, for every instruction set, and that no row depends on its company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import native_kernels
import pytest
import torch
from attention_world import AttentionWorld, Part
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kernels import INSTRUCTION_SETS, rounds

from worker.kernels import native
from worker.kernels.base import AttentionMetadata, SequenceSpan
from worker.kernels.cpu import CpuAttention
from worker.kernels.reference import ReferenceAttention

F32, BF16, F16 = native_kernels.DTYPES
PLAIN, ROUNDED = 2e-5, 2e-2  # ROUNDED: weights of the softmax are bfloat16

pytestmark = pytest.mark.skipif(native.module() is None, reason="the native kernels are not built in")

# (cached, new) of every sequence of a step. Edges of pairs, blocks and tiles; pieces and single rows.
RAGGED = [(0, 1), (0, 15), (12, 4), (16, 1), (0, 256), (254, 1), (255, 1), (256, 1), (3, 254), (599, 1), (200, 400)]
DECODES = [(0, 1), (14, 1), (15, 1), (254, 1), (255, 1), (250, 7), (599, 1), (513, 2)]

# dtype, heads, KV heads, head dim, block size, window, softcap, the step
CASES: list[tuple[torch.dtype, int, int, int, int, int | None, float | None, list[tuple[int, int]]]] = [
    (F32, 9, 3, 64, 16, None, None, RAGGED),
    (F32, 4, 4, 80, 8, 37, None, RAGGED),
    (F32, 8, 1, 96, 64, None, 2.0, DECODES),
    (F32, 14, 2, 128, 32, 300, None, DECODES),
    (F32, 3, 1, 8, 256, 1, None, RAGGED),
    (BF16, 9, 3, 64, 16, 300, None, RAGGED),
    (BF16, 14, 2, 80, 32, None, 2.0, DECODES),
    (BF16, 4, 4, 96, 8, 7, None, RAGGED),
    (BF16, 8, 1, 128, 64, None, None, DECODES),
    (BF16, 2, 2, 8, 16, 100, 3.0, DECODES),
    (F16, 8, 1, 64, 8, 255, 2.0, DECODES),
    (F16, 9, 3, 96, 32, None, None, RAGGED),
    (F16, 4, 4, 128, 16, 16, None, DECODES),
    (F16, 14, 2, 80, 64, None, None, DECODES),
    (F16, 32, 1, 8, 8, None, None, DECODES),
]


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    torch.set_num_threads(1)
    with native_kernels.poisoned_memory():
        yield


def tolerance(instruction_set: str, dtype: torch.dtype) -> float:
    return ROUNDED if rounds(instruction_set, dtype) else PLAIN


def step_of(spans: list[tuple[int, int]], **options: Any) -> tuple[AttentionWorld, list[Part], list[Part]]:
    """The world, the parts that are cached before the step, and those of the step."""
    world = AttentionWorld([cached + new for cached, new in spans], **options)
    before = [(sequence, 0, cached) for sequence, (cached, _) in enumerate(spans) if cached]
    return world, before, [(sequence, cached, cached + new) for sequence, (cached, new) in enumerate(spans)]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(part) for part in case[:7]))
def test_equals_full_softmax(case: Any, instruction_set: str) -> None:
    dtype, heads, kv_heads, head_dim, block_size, window, softcap, spans = case
    world, before, parts = step_of(
        spans,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        window=window,
        softcap=softcap,
    )
    backend = CpuAttention(2, instruction_set)
    world.run(backend, before)
    outputs = world.run(backend, parts)
    assert world.largest_error(parts, outputs) < tolerance(instruction_set, dtype)
    assert world.pool[:, 0].isnan().all()
    assert world.layer[world.spare].isnan().all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@settings(max_examples=25)
@given(
    spans=st.lists(
        st.tuples(st.sampled_from([0, 0, 1, 8, 15, 16, 240, 255, 256, 257]) | st.integers(0, 300), st.integers(1, 40)),
        min_size=1,
        max_size=8,
    ),
    heads=st.sampled_from([(1, 1), (6, 2), (4, 4), (8, 1), (14, 2), (25, 1)]),
    head_dim=st.sampled_from([8, 16, 24, 64]),
    block_size=st.sampled_from([8, 16, 32, 64, 128]),
    dtype=st.sampled_from(native_kernels.DTYPES),
    window=st.none() | st.integers(1, 300),
    softcap=st.none() | st.just(4.0),
    threads=st.sampled_from([1, 2]),
)
def test_random_mixes_of_spans(
    instruction_set: str,
    spans: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    threads: int,
) -> None:
    world, before, parts = step_of(
        spans,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        window=window,
        softcap=softcap,
    )
    backend = CpuAttention(threads, instruction_set)
    if before:
        world.run(backend, before)
    assert world.largest_error(parts, world.run(backend, parts)) < tolerance(instruction_set, dtype)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_agrees_with_the_reference_backend(instruction_set: str) -> None:
    outputs = []
    for backend in (ReferenceAttention(), CpuAttention(2, instruction_set)):
        world, before, parts = step_of(RAGGED, window=200)
        world.run(backend, before)
        outputs.append(torch.cat(world.run(backend, parts)))
    torch.testing.assert_close(outputs[1], outputs[0], atol=PLAIN, rtol=PLAIN)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_answers_in_the_type_of_the_rows(dtype: torch.dtype) -> None:
    world, before, parts = step_of(RAGGED, dtype=dtype)
    world.run(CpuAttention(1), before, rows=dtype)
    outputs = world.run(CpuAttention(1), parts, rows=dtype)
    assert {out.dtype for out in outputs} == {dtype}
    assert world.largest_error(parts, outputs) < ROUNDED


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", native_kernels.DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_pieces_company_and_threads_do_not_change_bits(
    instruction_set: str, dtype: torch.dtype, window: int | None
) -> None:
    lengths = [700, 90, 301]
    world = AttentionWorld(lengths, dtype=dtype, window=window)
    alone = [world.run(CpuAttention(1, instruction_set), [part])[0] for part in world.whole()]
    for threads in (1, 2, 3):
        world.poison()
        backend, done = CpuAttention(threads, instruction_set), [0] * len(lengths)
        pieces: list[list[torch.Tensor]] = [[] for _ in lengths]
        for sizes in ([1, 13, 0], [255, 1, 1], [1, 20, 3], [2, 1, 170], [300, 54, 1], [140, 1, 126], [1, 0, 0]):
            parts = [(s, done[s], done[s] + size) for s, size in enumerate(sizes) if size]
            for (s, _, end), out in zip(parts, world.run(backend, parts), strict=True):
                pieces[s].append(out)
                done[s] = end
        assert done == lengths
        for whole, parts_of_it in zip(alone, pieces, strict=True):
            assert torch.equal(torch.cat(parts_of_it), whole)


@pytest.mark.parametrize("dtype", native_kernels.DTYPES)
def test_decode_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    backend = CpuAttention(2)
    world, before, parts = step_of(DECODES, dtype=dtype, heads=9, kv_heads=3, head_dim=64)
    world.run(backend, before)
    for part, row in zip(parts, world.run(backend, parts), strict=True):
        assert torch.equal(world.run(backend, [part])[0], row)


@pytest.mark.parametrize(("dtype", "zeroed_slots"), [(F32, 0), (F16, 0), (BF16, 1)])
@pytest.mark.parametrize("company", [[], [(0, 0, 20)]])  # alone a short piece is written by the units that attend
def test_only_the_scheduled_slots_are_written(company: list[Part], dtype: torch.dtype, zeroed_slots: int) -> None:
    """In bfloat16 two slots of V lie together, and an odd number of rows leaves a zero after the last."""
    world = AttentionWorld([20, 33], dtype=dtype, heads=2)
    world.run(CpuAttention(2), [(1, 0, 9), *company])
    rows = 9 + sum(end - start for _, start, end in company)
    assert int((~world.pool.isnan()).sum()) == (2 * rows + zeroed_slots) * world.kv_heads * world.head_dim
    assert world.pool[:, 0].isnan().all()


def test_a_block_size_or_head_dim_that_does_not_fit() -> None:
    for options in ({"block_size": 4}, {"head_dim": 12}, {"block_size": 512}, {"block_size": 24}):
        world = AttentionWorld([5], **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no native attention for block size"):
            world.run(CpuAttention(1), world.whole())


@pytest.mark.parametrize("block", [-1, 10**6, 2**31 - 1])
def test_a_block_outside_the_pool_is_refused_and_nothing_is_written(block: int) -> None:
    world = AttentionWorld([40])
    world.tables[0][1] = block
    with pytest.raises(ValueError, match="block id"):
        world.run(CpuAttention(1), world.whole())
    assert world.pool.isnan().all()


def test_a_table_that_is_too_short_is_refused() -> None:
    world = AttentionWorld([17])
    world.run(CpuAttention(1), [(0, 0, 16)])
    pool = world.pool.clone()
    slots = torch.tensor([0])
    span = SequenceSpan(row=0, count=1, start=16, block_table=world.tables[0][:1])
    row = (world.q[0][16:], world.k[0][16:], world.v[0][16:])
    with pytest.raises(ValueError, match="does not fit its block table"):
        CpuAttention(1).forward(*row, world.layer, AttentionMetadata((span,), slots), scale=1.0)
    assert torch.equal(world.pool.nan_to_num(9.0), pool.nan_to_num(9.0))
