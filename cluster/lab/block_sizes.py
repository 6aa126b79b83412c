"""The block-size experiment: 1 to 256 tokens a block, and the order of numbers inside the pool (article 2.2).

Owns: putting counts and times side by side, and the claims.
Does not: count (block_size_counts), time layouts (kv_layouts) or compute attention (worker.kernels).
Invariants: times are of one layer's decode attention with the heads of the model, in one thread, which other work on
the machine disturbs least; one kernel times all sizes: the native one those that it takes, else the reference.
"""

from __future__ import annotations

import json

import torch

from cluster.lab.attention_case import AttentionCase, CaseShape, HeadShape, quickest
from cluster.lab.block_size_counts import BlockCosts, block_costs
from cluster.lab.findings import Chart, Claim, Findings, LabContext, Series, Table, Verdict
from cluster.lab.joined_findings import joined
from cluster.lab.kernels import head_shape
from cluster.lab.kv_layouts import copy_seconds, read_seconds, score_seconds
from cluster.model_shape import read_shape
from worker.kernels import native
from worker.kernels.cpu import CpuAttention
from worker.kernels.reference import ReferenceAttention

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHORT_SIZES = (1, 16, 256)
DEFAULT = 16


def run(context: LabContext) -> Findings:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        parts = [_sizes(context), _layouts(context)]
    finally:
        torch.set_num_threads(before)
    figures = {name: value for part in parts for name, value in part.figures.items()}
    summary = (
        f"Blocks of {DEFAULT} leave {figures['size.16.waste']:.1%} of their slots unused, blocks of 256 "
        f"{figures['size.256.waste']:.1%}; blocks of 1 need {figures['size.1.metadata_bytes_per_token']:.0f} bytes of "
        f"books a token instead of {figures['size.16.metadata_bytes_per_token']:.1f}."
    )
    return joined("block-size", "Block size and layout", summary, parts)


def _shape(context: LabContext, block_size: int) -> CaseShape:
    if context.short:
        return CaseShape(sequences=2, length=256, rows=1, block_size=block_size, layers=2)
    return CaseShape(sequences=8, length=1024, rows=1, block_size=block_size)


def _read_ms(context: LabContext, heads: HeadShape, sizes: tuple[int, ...]) -> tuple[dict[int, float], str]:
    """Milliseconds of a decode read by block size, all by the same kernel: native where it takes some of them."""
    fast = tuple(size for size in sizes if native.instruction_set(size, heads.head_dim) is not None)
    backend = CpuAttention(1) if fast else ReferenceAttention()
    works = {}
    for size in fast or sizes:
        case = AttentionCase(heads, _shape(context, size), context.seed)
        works[str(size)] = case.prepared(backend, case.pool().layer)
    seconds = quickest(works, 1 if context.short else 8)
    return {int(size): 1e3 * value for size, value in seconds.items()}, backend.name


def _sizes(context: LabContext) -> Findings:
    sizes = SHORT_SIZES if context.short else SIZES
    costs: dict[int, BlockCosts] = {}
    for number, size in enumerate(sizes):
        context.progress("block sizes: counts", 0.5 * number / len(sizes))
        costs[size] = block_costs(size, context.seed)
    context.progress("block sizes: decode reads", 0.5)
    reads, kernel = _read_ms(context, head_shape(context), sizes)
    figures: dict[str, float | int | str | bool] = {"counts.engine_equals_lab": True, "read.kernel": kernel}
    for size, one in costs.items():
        figures[f"size.{size}.waste"] = round(one.waste, 4)
        figures[f"size.{size}.hits_lost"] = round(one.lost, 4)
        figures[f"size.{size}.metadata_bytes_per_token"] = round(one.metadata_bytes, 3)
        figures[f"size.{size}.book_us_per_token"] = round(one.book_us, 3)
        if size in reads:
            figures[f"size.{size}.read_ms"] = round(reads[size], 4)
    table = Table(
        title="By block size",
        header=(
            "block size",
            "slots unused",
            "hits lost",
            "books, bytes a token",
            "books, µs a token",
            "read, ms",
        ),
        rows=tuple(
            (
                str(size),
                f"{one.waste:.1%}",
                f"{one.lost:.1%}",
                f"{one.metadata_bytes:.1f}",
                f"{one.book_us:.2f}",
                f"{reads[size]:.2f}" if size in reads else "not native",
            )
            for size, one in costs.items()
        ),
        note=f"Reads: decode attention of one layer by the {kernel} kernel, one thread. Hits lost: of a chat's "
        "prompt tokens, if only whole blocks were reused; the production cache copies the block at the border and "
        "loses none.",
    )
    return Findings("block-size", "Sizes", "", (_size_claim(costs, reads),), (table,), _charts(costs, reads), figures)


def _size_claim(costs: dict[int, BlockCosts], reads: dict[int, float]) -> Claim:
    one, usual, large = costs[1], costs[DEFAULT], costs[256]
    spread = f"{min(reads.values()):.2f} to {max(reads.values()):.2f} ms for sizes {min(reads)} to {max(reads)}"
    good = usual.waste < large.waste / 4 and one.metadata_bytes > 4 * usual.metadata_bytes
    return Claim(
        "2.2",
        "16 is a good block size: 1 explodes the metadata, a large one wastes the tail",
        "waste grows with the size, books shrink with it",
        f"unused slots {one.waste:.1%}, {usual.waste:.1%} and {large.waste:.1%} at 1, 16 and 256; books "
        f"{one.metadata_bytes:.1f}, {usual.metadata_bytes:.1f} and {large.metadata_bytes:.1f} bytes a token; a decode "
        f"read takes {spread}",
        Verdict.CONFIRMED if good else Verdict.DEPENDS,
    )


def _charts(costs: dict[int, BlockCosts], reads: dict[int, float]) -> tuple[Chart, ...]:
    x = tuple(float(size) for size in costs)
    return (
        Chart(
            name="block-size-loss",
            title="What large blocks lose",
            x_label="block size, tokens",
            y_label="share",
            series=(
                Series("slots unused", x, tuple(one.waste for one in costs.values())),
                Series("hits lost by whole blocks", x, tuple(one.lost for one in costs.values())),
            ),
            log_x=True,
        ),
        Chart(
            name="block-size-read",
            title="Decode attention of one layer",
            x_label="block size, tokens",
            y_label="milliseconds",
            series=(Series("read", tuple(float(size) for size in reads), tuple(reads.values())),),
            log_x=True,
        ),
    )


def _layouts(context: LabContext) -> Findings:
    heads, shape = head_shape(context), _shape(context, DEFAULT)
    layers = read_shape(json.loads((context.model_dir / "config.json").read_text(encoding="utf-8"))).num_layers
    rounds = 2 if context.short else 20
    context.progress("layouts: decode reads", 0.8)
    reads = read_seconds(heads, shape, rounds, context.seed)
    context.progress("layouts: scores and copies", 0.9)
    scores = score_seconds(heads, shape, rounds, context.seed)
    copies = copy_seconds(heads, shape, layers, rounds)
    figures: dict[str, float | int | str | bool] = {"layout.same_answers": True}
    rows = []
    for what, unit, found in (("read", 1e3, reads), ("scores", 1e3, scores), ("copy", 1e6, copies)):
        for name, seconds in found.items():
            figures[f"layout.{what}.{name}.seconds"] = round(seconds, 8)
            rows.append((_WORDS[what], name.replace("_", "-"), f"{unit * seconds:.2f} {'ms' if unit == 1e3 else 'µs'}"))
    reading, copying = (found["block_first"] / found["layer_first"] for found in (reads, copies))
    scoring = scores["transposed"] / scores["plain"]
    claim = Claim(
        "2.2",
        "The layout (blocks, layers, 2, KV heads, block, dim) reads contiguously and so uses the bandwidth",
        "faster decode reads than another order",
        f"against layer-first: a decode read takes {reading:.2f} times as long, the copy of a whole block "
        f"{copying:.2f} times; scores with K transposed {scoring:.2f} times as long as with plain K, in torch",
        Verdict.CONFIRMED if reading < 0.9 else Verdict.DEPENDS if copying < 1 else Verdict.NOT_CONFIRMED,
    )
    table = Table(
        title="Layouts",
        header=("what", "layout", "time"),
        rows=tuple(rows),
        note="One thread. Both pools hold the same numbers and give the same answers. Within a block and a layer "
        "the order is equal, so what differs for a read is only how far apart the blocks of one layer lie.",
    )
    return Findings("block-size", "Layouts", "", (claim,), (table,), figures=figures)


_WORDS = {
    "read": "decode attention of one layer",
    "scores": "scores of one query, plain torch",
    "copy": "copy of one block, all layers",
}
