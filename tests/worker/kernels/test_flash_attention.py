"""The flash backend over a stand-in of flash_attn_varlen_func, against a full softmax and the reference backend.

The stand-in is written from the documented contract of the package, in plain torch, and refuses what the kernels
refuse; `make flash-env` checks the same backend against the real function as far as a machine without a GPU can.
"""

from __future__ import annotations

import functools
import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_world import AttentionWorld, Part
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.errors import ConfigError
from worker.kernels.base import AttentionMetadata, SequenceSpan
from worker.kernels.flash.backend import FlashAttention
from worker.kernels.flash.calls import VarlenFunction, adapt
from worker.kernels.flash.contract_check import PARAMETERS
from worker.kernels.flash.limits import why_not_layer, why_not_sizes
from worker.kernels.flash.step import KEY_TILE, FlashStep
from worker.kernels.reference import ReferenceAttention

F16, BF16 = torch.float16, torch.bfloat16
TOLERANCE = {F16: 4e-3, BF16: 2e-2}  # outputs are rounded to the pool's dtype


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    key_lengths: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: torch.Tensor,
) -> torch.Tensor:
    refuse_what_kernels_refuse(q, k, v, cu_seqlens_q, key_lengths, max_seqlen_q, block_table)
    left, right = (-1 if size >= max_seqlen_k else size for size in window_size)
    right = 0 if causal else right
    out = torch.full_like(q, float("nan"))
    for b, (start, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        num_q, num_k = min(end - start, max_seqlen_q), int(key_lengths[b])
        blocks = looked_up(block_table[b], num_k, k)
        group = q.shape[1] // k.shape[2]
        keys, values = (x[blocks].flatten(0, 1)[:num_k].double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start : start + num_q].double(), keys) * softmax_scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        query_at = torch.arange(num_q)[:, None] + num_k - (end - start)  # aligned to the bottom right corner
        distance = torch.arange(num_k) - query_at
        hidden = ((distance > right) & (right >= 0)) | ((distance < -left) & (left >= 0))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0)
        out[start : start + num_q] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def refuse_what_kernels_refuse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    key_lengths: torch.Tensor,
    max_seqlen_q: int,
    block_table: torch.Tensor,
) -> None:
    batch = len(cu_seqlens_q) - 1
    assert batch > 0
    assert q.dtype in (F16, BF16) and q.dtype == k.dtype == v.dtype
    for lengths in (cu_seqlens_q, key_lengths):
        assert lengths.dtype == torch.int32 and lengths.is_contiguous()
    assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1 and len(block_table) == batch
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape == v.shape and k.shape[3] == q.shape[2] and q.shape[1] % k.shape[2] == 0
    assert k.shape[1] % 16 == 0 and q.shape[2] % 8 == 0 and q.shape[2] <= 256
    assert max_seqlen_q > 1 or len(q) == batch  # its heads are regrouped by a reshape


def looked_up(row: torch.Tensor, num_k: int, cache: torch.Tensor) -> torch.Tensor:
    """The blocks of a sequence; 2.6.2 reads the table up to the end of the last key tile, whatever the length."""
    block_size = cache.shape[1]
    assert len(row) * block_size >= -(-num_k // KEY_TILE) * KEY_TILE
    assert bool(((row >= 0) & (row < len(cache))).all())
    return row[: -(-num_k // block_size)].long()


def wheel_function(  # the signature of vllm-flash-attn 2.6.2
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    out: Any = None,
) -> torch.Tensor:
    assert softmax_scale is not None and out is None
    assert cu_seqlens_k.dtype == torch.int32 and cu_seqlens_k.is_contiguous()
    used = (cu_seqlens_k[1:] - cu_seqlens_k[:-1]).contiguous()
    lengths = (cu_seqlens_q, used, max_seqlen_q, max_seqlen_k)
    return paged_attention(q, k, v, *lengths, softmax_scale, causal, window_size, softcap, block_table)


def vllm_function(  # the parameters that matter of the copy inside vLLM
    q: Any,
    k: Any,
    v: Any,
    max_seqlen_q: int,
    cu_seqlens_q: Any,
    max_seqlen_k: int,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: list[int] | None = None,
    softcap: float = 0.0,
    block_table: Any = None,
    fa_version: int = 2,
) -> torch.Tensor:
    assert softmax_scale is not None and cu_seqlens_k is None and fa_version in (2, 3)
    window = (-1, -1) if window_size is None else (window_size[0], window_size[1])
    lengths = (cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k)
    return paged_attention(q, k, v, *lengths, softmax_scale, causal, window, softcap, block_table)


def old_function(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    block_table: Any = None,
) -> torch.Tensor:
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options: Any = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
    return wheel_function(q, k, v, *lengths, block_table=block_table, **options)


SIGNATURES: dict[str, tuple[VarlenFunction, int | None]] = {"wheel": (wheel_function, None), "vllm": (vllm_function, 3)}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=SIGNATURES)
def backend(request: pytest.FixtureRequest) -> FlashAttention:
    return backend_of(request.param)


def backend_of(signature: str) -> FlashAttention:
    function, fa_version = SIGNATURES[signature]
    return FlashAttention(adapt(function, signature, fa_version))


def recording(function: VarlenFunction) -> tuple[FlashAttention, list[dict[str, Any]]]:
    """A backend, and the arguments of its calls."""
    calls: list[dict[str, Any]] = []

    @functools.wraps(function)
    def recorded(**named: Any) -> torch.Tensor:
        calls.append(named)
        return function(**named)

    return FlashAttention(adapt(recorded, "recorded")), calls


# (cached, new) of every sequence of a step. Edges of blocks and tiles; pieces and single rows.
RAGGED = [(0, 1), (0, 15), (12, 4), (16, 1), (0, 256), (254, 1), (255, 1), (256, 1), (3, 254), (599, 1), (200, 400)]
DECODES = [(0, 1), (14, 1), (15, 1), (254, 1), (255, 1), (256, 1), (599, 1)]

# dtype, heads, KV heads, head dim, block size, window, softcap, the step
CASES: list[tuple[torch.dtype, int, int, int, int, int | None, float | None, list[tuple[int, int]]]] = [
    (BF16, 9, 3, 64, 16, None, None, RAGGED),
    (BF16, 9, 3, 64, 16, 300, None, RAGGED),
    (BF16, 14, 2, 80, 32, None, 2.0, DECODES),
    (BF16, 4, 4, 96, 48, 7, None, RAGGED),
    (BF16, 8, 1, 128, 64, None, None, DECODES),
    (BF16, 2, 2, 8, 16, 100, 3.0, DECODES),
    (F16, 8, 1, 64, 16, 255, 2.0, DECODES),
    (F16, 9, 3, 96, 32, None, None, RAGGED),
    (F16, 4, 4, 128, 16, 16, None, DECODES),
    (F16, 3, 1, 256, 256, 1, None, RAGGED),
    (F16, 2, 1, 32, 512, None, None, RAGGED),
]


def step_of(spans: list[tuple[int, int]], **options: Any) -> tuple[AttentionWorld, list[Part], list[Part]]:
    """The world, the parts that are cached before the step, and those of the step."""
    world = AttentionWorld([cached + new for cached, new in spans], **options)
    before = [(sequence, 0, cached) for sequence, (cached, _) in enumerate(spans) if cached]
    return world, before, [(sequence, cached, cached + new) for sequence, (cached, new) in enumerate(spans)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(part) for part in case[:7]))
def test_equals_full_softmax_and_reference(case: Any, backend: FlashAttention) -> None:
    dtype, heads, kv_heads, head_dim, block_size, window, softcap, spans = case
    options = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    world, before, parts = step_of(spans, dtype=dtype, window=window, softcap=softcap, **options)
    world.run(backend, before)
    outputs = world.run(backend, parts)
    assert world.largest_error(parts, outputs) < TOLERANCE[dtype]
    assert world.pool[:, 0].isnan().all()
    assert world.layer[world.spare].isnan().all()
    written = world.pool.clone()
    world.poison()
    world.run(ReferenceAttention(), before, rows=dtype)
    expected = torch.cat(world.run(ReferenceAttention(), parts, rows=dtype)).float()
    torch.testing.assert_close(torch.cat(outputs), expected, atol=TOLERANCE[dtype], rtol=0.0)
    torch.testing.assert_close(world.pool, written, equal_nan=True, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("signature", SIGNATURES)
@settings(max_examples=40)
@given(
    spans=st.lists(
        st.tuples(st.sampled_from([0, 0, 1, 15, 16, 240, 255, 256, 257]) | st.integers(0, 300), st.integers(1, 40)),
        min_size=1,
        max_size=8,
    ),
    heads=st.sampled_from([(1, 1), (6, 2), (4, 4), (8, 1), (14, 2)]),
    head_dim=st.sampled_from([8, 16, 24, 64]),
    block_size=st.sampled_from([16, 32, 48, 128]),
    dtype=st.sampled_from([F16, BF16]),
    window=st.none() | st.integers(1, 300),
    softcap=st.none() | st.just(4.0),
)
def test_random_mixes_of_spans(
    signature: str,
    spans: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
) -> None:
    options = {"heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim, "block_size": block_size}
    world, before, parts = step_of(spans, dtype=dtype, window=window, softcap=softcap, **options)
    backend = backend_of(signature)
    if before:
        world.run(backend, before)
    assert world.largest_error(parts, world.run(backend, parts)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_answers_in_the_type_of_the_rows(backend: FlashAttention, dtype: torch.dtype) -> None:
    world, before, parts = step_of(RAGGED, dtype=dtype)
    for rows in (dtype, torch.float32):
        world.run(backend, before, rows=rows)
        assert {out.dtype for out in world.run(backend, parts, rows=rows)} == {rows}


def test_an_empty_batch(backend: FlashAttention) -> None:
    world = AttentionWorld([5], dtype=BF16)
    metadata = AttentionMetadata(spans=(), slot_mapping=torch.empty(0, dtype=torch.int64))
    rows = torch.empty(0, world.heads, world.head_dim)
    kv = torch.empty(0, world.kv_heads, world.head_dim)
    assert backend.forward(rows, kv, kv, world.layer, metadata, scale=1.0).shape == rows.shape
    assert world.pool.isnan().all()


def test_the_pool_is_attended_in_place() -> None:
    """No copy, though the layer is a strided view and the heads are the outer dimension of a block."""
    backend, calls = recording(wheel_function)
    world, before, parts = step_of(RAGGED, dtype=BF16)
    world.run(backend, before)
    world.run(backend, parts)
    k, v = calls[-1]["k"], calls[-1]["v"]
    assert not world.layer.is_contiguous()
    assert (k.data_ptr(), v.data_ptr()) == (world.layer[:, 0].data_ptr(), world.layer[:, 1].data_ptr())
    assert k.shape == v.shape == (len(world.layer), world.block_size, world.kv_heads, world.head_dim)
    assert k.stride() == v.stride()
    assert k.stride(0) == world.pool.stride(0)


def test_a_step_is_described_once_for_all_layers() -> None:
    backend, calls = recording(vllm_function)
    world = AttentionWorld([40], dtype=BF16)
    table = world.tables[0]

    def forward(metadata: AttentionMetadata, layer: int) -> None:
        q, k, v = (x[0][:1] for x in (world.q, world.k, world.v))
        backend.forward(q, k, v, world.pool[:, layer], metadata, scale=1.0)

    first, second = (
        AttentionMetadata((SequenceSpan(0, 1, at, table),), table[at // 16 :][:1] * 16 + at % 16) for at in (0, 1)
    )
    for metadata in (first, second):
        for layer in (0, 1):
            forward(metadata, layer)
    tables = [call["block_table"] for call in calls]
    assert tables[0] is tables[1] and tables[2] is tables[3] and tables[1] is not tables[2]
    assert [call["max_seqlen_k"] for call in calls] == [1, 1, 2, 2]


def test_the_tensors_of_a_step() -> None:
    tables = [torch.tensor([7, 3, 9, 4]), torch.tensor([5])]  # the first has a block in reserve
    spans = (SequenceSpan(0, 3, 30, tables[0]), SequenceSpan(3, 1, 15, tables[1]))
    step = FlashStep.build(AttentionMetadata(spans, torch.zeros(4, dtype=torch.int64)), 4, 16)
    assert step.cu_seqlens_q.tolist() == [0, 3, 4]
    assert step.cu_seqlens_k.tolist() == [0, 33, 49]
    assert step.seqused_k.tolist() == [33, 16]
    assert (step.max_seqlen_q, step.max_seqlen_k) == (3, 33)
    assert step.block_table.tolist() == [[7, 3, 9] + [9] * 13, [5] * 16]


@pytest.mark.parametrize(("length", "block_size", "width"), [(256, 16, 16), (257, 16, 32), (1, 48, 6), (1, 512, 1)])
def test_the_block_table_covers_whole_key_tiles(length: int, block_size: int, width: int) -> None:
    span = SequenceSpan(0, 1, length - 1, torch.arange(-(-length // block_size)))
    step = FlashStep.build(AttentionMetadata((span,), torch.zeros(1, dtype=torch.int64)), 1, block_size)
    assert step.block_table.shape == (1, width)


def test_a_table_that_is_too_short_is_refused_and_nothing_is_written(backend: FlashAttention) -> None:
    world = AttentionWorld([17], dtype=BF16)
    span = SequenceSpan(0, 1, 16, world.tables[0][:1])
    row = (world.q[0][16:], world.k[0][16:], world.v[0][16:])
    with pytest.raises(ValueError, match="does not fit its block table"):
        backend.forward(*row, world.layer, AttentionMetadata((span,), torch.tensor([0])), scale=1.0)
    assert world.pool.isnan().all()


@pytest.mark.parametrize("rows", [(0, 2), (1, 0), (0, 1)])
def test_spans_must_cover_the_rows_in_order(rows: tuple[int, int]) -> None:
    table = torch.tensor([0])
    spans = tuple(SequenceSpan(row, 1, 0, table) for row in rows)
    with pytest.raises(ValueError, match="do not cover the 3 rows in order"):
        FlashStep.build(AttentionMetadata(spans, torch.zeros(3, dtype=torch.int64)), 3, 16)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"block_size": 8}, "block size 8 is not a multiple of 16"),
        ({"block_size": 24}, "block size 24 is not a multiple of 16"),
        ({"head_dim": 12}, "multiple of 8"),
        ({"head_dim": 264}, "head dim 264 is not a multiple of 8 up to 256"),
        ({"dtype": torch.float32}, "float32 is neither float16 nor bfloat16"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(backend: FlashAttention, options: Any, reason: str) -> None:
    world = AttentionWorld([5], **({"dtype": BF16} | options))
    with pytest.raises(ConfigError, match=f"flash is not possible: .*{reason}"):
        world.run(backend, world.whole())
    assert world.pool.isnan().all()


def test_limits_of_sizes_and_views() -> None:
    assert why_not_sizes(16, 64, BF16) is None
    assert why_not_sizes(1024, 256, F16) is None
    pool = torch.empty(3, 2, 2, 4, 16, 64, dtype=BF16, device="meta")
    assert why_not_layer(pool[:, 1]) is None
    assert "stride 64 instead of 1" in str(why_not_layer(pool[:, 1].transpose(3, 4)))
    shape, strides = (3, 2, 4, 16, 64), pool[:, 1].stride()
    unaligned = pool.flatten()[4:].as_strided(shape, strides)
    assert "8 numbers" in str(why_not_layer(unaligned))
    padded = torch.empty(3, 2, 4, 16, 68, dtype=BF16, device="meta")[..., :64]
    assert "8 numbers" in str(why_not_layer(padded))
    huge = torch.empty_strided(shape, (2**31, *strides[1:]), dtype=BF16, device="meta")
    assert "take smaller blocks" in str(why_not_layer(huge))


def test_softcap_needs_a_signature_that_has_it() -> None:
    backend = FlashAttention(adapt(old_function, "vllm-flash-attn 2.5.9"))
    world = AttentionWorld([20], dtype=BF16, softcap=3.0)
    with pytest.raises(ConfigError, match=r"vllm-flash-attn 2\.5\.9 has no softcap"):
        world.run(backend, world.whole())
    assert world.pool.isnan().all()
    world.softcap = None
    assert world.largest_error(world.whole(), world.run(backend, world.whole())) < TOLERANCE[BF16]


def test_only_the_scheduled_slots_are_written(backend: FlashAttention) -> None:
    world = AttentionWorld([20, 33], dtype=BF16, heads=2)
    world.run(backend, [(1, 0, 9), (0, 0, 20)])
    assert int((~world.pool.isnan()).sum()) == 2 * 29 * world.kv_heads * world.head_dim
    assert world.pool[:, 0].isnan().all()


def test_another_writer_writes_before_the_attention() -> None:
    world = AttentionWorld([20], dtype=BF16)
    given_to_it = []

    def write(key: torch.Tensor, value: torch.Tensor, layer_kv: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        given_to_it.append((key, value, layer_kv.data_ptr(), slot_mapping.tolist()))
        layer_kv.fill_(0.5)

    outputs = world.run(FlashAttention(adapt(wheel_function, "wheel"), write), world.whole())
    ((key, value, where, slots),) = given_to_it
    assert torch.equal(key, world.k[0]) and torch.equal(value, world.v[0])
    assert where == world.layer.data_ptr()
    assert slots == [int(world.tables[0][at // 16]) * 16 + at % 16 for at in range(20)]
    assert torch.equal(outputs[0], torch.full_like(outputs[0], 0.5))


def test_the_version_chooses_among_the_kernels_of_vllm() -> None:
    calls: list[dict[str, Any]] = []

    @functools.wraps(vllm_function)
    def recorded(**named: Any) -> torch.Tensor:
        calls.append(named)
        return vllm_function(**named)

    world = AttentionWorld([5], dtype=BF16)
    for fa_version in (2, 3):
        world.run(FlashAttention(adapt(recorded, "vLLM", fa_version)), world.whole())
    assert [call["fa_version"] for call in calls] == [2, 3]


def test_a_function_that_is_not_known_is_refused() -> None:
    def unpaged(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> Any: ...

    with pytest.raises(ConfigError, match="has no parameter block_table, causal, max_seqlen_k"):
        adapt(unpaged, "a package")
    with pytest.raises(ConfigError, match="has no parameter fa_version"):
        adapt(wheel_function, "a package", 3)


def test_the_stand_in_has_the_signature_that_make_flash_env_checks() -> None:
    assert tuple(inspect.signature(wheel_function).parameters) == PARAMETERS


def test_blocks_of_reference_and_flash_are_alike() -> None:
    assert FlashAttention.layout == ReferenceAttention.layout
