"""The reference kernel against a full softmax, and the promise that batch and piece do not change a row's bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from worker.kernels import native, select_backend
from worker.kernels.base import AttentionMetadata, SequenceSpan
from worker.kernels.reference import ReferenceAttention


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(7)


@dataclass
class World:
    """Sequences with random q, k, v for every position, over one poisoned pool."""

    lengths: Sequence[int]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        sizes = [-(-length // self.block_size) for length in self.lengths]
        order = torch.randperm(sum(sizes) + 3)
        self.tables = list(order[: sum(sizes)].split(sizes))
        self.q = [torch.randn(n, self.heads, self.head_dim).to(self.dtype) for n in self.lengths]
        self.k = [torch.randn(n, self.kv_heads, self.head_dim).to(self.dtype) for n in self.lengths]
        self.v = [torch.randn(n, self.kv_heads, self.head_dim).to(self.dtype) for n in self.lengths]
        shape = (sum(sizes) + 3, 2, 2, self.kv_heads, self.block_size, self.head_dim)
        self.pool = torch.full(shape, float("nan"), dtype=self.dtype)
        self.layer = self.pool[:, 1]

    def run(self, parts: Sequence[tuple[int, int, int]], **options: float | int | None) -> list[torch.Tensor]:
        """One step over parts (sequence, start, end); KV before `start` must be in the pool already."""
        spans, slots, row = [], [], 0
        for sequence, start, end in parts:
            table, at = self.tables[sequence], torch.arange(start, end)
            slots.append(table[at // self.block_size] * self.block_size + at % self.block_size)
            spans.append(SequenceSpan(row=row, count=end - start, start=start, block_table=table))
            row += end - start
        q, k, v = (torch.cat([x[s][a:b] for s, a, b in parts]) for x in (self.q, self.k, self.v))
        metadata = AttentionMetadata(spans=tuple(spans), slot_mapping=torch.cat(slots))
        out = ReferenceAttention().forward(q, k, v, self.layer, metadata, scale=0.3, **options)  # type: ignore[arg-type]
        return list(out.split([end - start for _, start, end in parts]))

    def oracle(self, sequence: int, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        """Full softmax in fp64 over all positions of one sequence: [n, heads, head_dim]."""
        group = self.heads // self.kv_heads
        q = self.q[sequence].double().transpose(0, 1)
        k, v = (x[sequence].double().transpose(0, 1).repeat_interleave(group, 0) for x in (self.k, self.v))
        scores = q @ k.transpose(1, 2) * 0.3
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        n = scores.shape[-1]
        distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        hidden = (distance < 0) | (distance >= (window or n))
        return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)


def whole(world: World) -> list[tuple[int, int, int]]:
    return [(s, 0, n) for s, n in enumerate(world.lengths)]


@pytest.mark.parametrize("window", [None, 1, 7, 100, 300])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_ragged_prefill_equals_full_softmax(window: int | None, softcap: float | None) -> None:
    world = World([1, 300, 17, 513, 256, 64])
    for sequence, out in enumerate(world.run(whole(world), sliding_window=window, softcap=softcap)):
        torch.testing.assert_close(out.double(), world.oracle(sequence, window, softcap), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (4, 4), (8, 1), (9, 3), (14, 2)])
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_head_shapes(heads: int, kv_heads: int, head_dim: int) -> None:
    world = World([40, 3], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    for sequence, out in enumerate(world.run(whole(world))):
        torch.testing.assert_close(out.double(), world.oracle(sequence), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block_size", [1, 4, 24, 100, 256, 1024])
def test_block_sizes_also_those_that_do_not_divide_a_tile(block_size: int) -> None:
    world = World([300, 5, 530], block_size=block_size)
    for sequence, out in enumerate(world.run(whole(world))):
        torch.testing.assert_close(out.double(), world.oracle(sequence), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_half_precision_accumulates_in_fp32(dtype: torch.dtype, tolerance: float) -> None:
    world = World([70, 300], dtype=dtype)
    for sequence, out in enumerate(world.run(whole(world))):
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), world.oracle(sequence), atol=tolerance, rtol=tolerance)


def test_only_the_scheduled_slots_are_written() -> None:
    world = World([20, 33])
    world.run([(1, 0, 18)])
    written = ~torch.isnan(world.pool)
    assert written.sum() == 18 * 2 * world.kv_heads * world.head_dim
    assert not written[:, 0].any()
    table = world.tables[1]
    assert torch.equal(world.layer[table[1], 0, :, 1], world.k[1][17])
    assert torch.equal(world.layer[table[1], 1, :, 1], world.v[1][17])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("window", [None, 40])
def test_pieces_and_company_do_not_change_bits(threads: int, window: int | None) -> None:
    torch.set_num_threads(threads)
    lengths = [700, 90, 301]
    state = torch.get_rng_state()
    world = World(lengths)
    alone = [world.run([(s, 0, n)], sliding_window=window)[0] for s, n in enumerate(lengths)]
    torch.set_rng_state(state)
    world = World(lengths)
    done = [0] * len(lengths)
    pieces: list[list[torch.Tensor]] = [[] for _ in lengths]
    for sizes in ([1, 13, 0], [255, 1, 1], [1, 20, 3], [2, 1, 170], [300, 54, 1], [140, 1, 126], [1, 0, 0]):
        parts = [(s, done[s], done[s] + size) for s, size in enumerate(sizes) if size]
        for (s, _, end), out in zip(parts, world.run(parts, sliding_window=window), strict=True):
            pieces[s].append(out)
            done[s] = end
    assert done == lengths
    for s in range(len(lengths)):
        assert torch.equal(torch.cat(pieces[s]), alone[s])


def test_decode_rows_do_not_depend_on_the_batch() -> None:
    lengths = [1, 2, 16, 17, 255, 256, 257, 600, 31, 512]
    world = World(lengths)
    world.run([(s, 0, n - 1) for s, n in enumerate(lengths) if n > 1])
    last = [(s, n - 1, n) for s, n in enumerate(lengths)]
    together = world.run(last)
    for part, row in zip(last, together, strict=True):
        assert torch.equal(world.run([part])[0], row)


@pytest.mark.parametrize(
    ("device", "wanted", "block_size", "with_module", "found", "level"),
    [
        ("cpu", "auto", 16, True, "cpu", "INFO"),
        ("cpu", "cpu", 16, True, "cpu", "INFO"),
        ("cpu", "auto", 4, True, "reference", "WARNING"),
        ("cpu", "auto", 16, False, "reference", "WARNING"),
        ("cuda", "auto", 16, True, "triton", "INFO"),
        ("cuda", "triton", 16, True, "triton", "INFO"),
        ("cuda", "reference", 16, True, "reference", None),
        ("cpu", "reference", 16, True, "reference", None),
    ],
)
def test_selection_is_logged(
    device: str,
    wanted: str,
    block_size: int,
    with_module: bool,
    found: str,
    level: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if with_module and native.module() is None:
        pytest.skip("the native kernels are not built in")
    if not with_module:
        monkeypatch.setattr(native, "_cpu", None)
    with caplog.at_level("INFO"):
        assert select_backend(device, wanted, block_size=block_size).name == found
    assert [record.levelname for record in caplog.records] == [level] * (level is not None)
