"""The kernels experiment: attention that gathers first, the readable reference, and the native kernel (2.4 and 5.3).

Owns: the two cases (decode and a prefill piece), the comparison of numbers, times and bytes, and the claims.
Does not: compute attention (worker.kernels, gathered_attention) or count bytes by itself (torch_traffic).
Invariants: the answers of all kernels agree within float rounding, else the experiment fails; bytes are those of
tensors; every kernel has one thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

import torch

from cluster.lab.attention_case import AttentionCase, CaseShape, HeadShape, quickest
from cluster.lab.findings import Chart, Claim, Findings, LabContext, Series, Table, Verdict
from cluster.lab.gathered_attention import GatheredAttention
from cluster.lab.torch_traffic import TorchTraffic
from cluster.model_shape import read_shape
from worker.kernels import native
from worker.kernels.base import AttentionBackend
from worker.kernels.cpu import CpuAttention
from worker.kernels.reference import ReferenceAttention

TOLERANCE = 1e-4
DECODE = CaseShape(sequences=8, length=2048, rows=1)
PIECE = CaseShape(sequences=1, length=2048, rows=256)
SHORT_DECODE = CaseShape(sequences=2, length=128, rows=1)
SHORT_PIECE = CaseShape(sequences=1, length=128, rows=32)


class Measured(NamedTuple):
    """moved: bytes read and written in one call.  extra: bytes of KV copied out of the blocks, held at once."""

    seconds: float
    moved: int
    extra: int
    error: float


def head_shape(context: LabContext) -> HeadShape:
    """Of the model: its heads are what is measured, its weights are not needed."""
    shape = read_shape(json.loads((context.model_dir / "config.json").read_text(encoding="utf-8")))
    return HeadShape(heads=shape.num_heads, kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)


def run(context: LabContext) -> Findings:
    heads = head_shape(context)
    shapes = {"decode": SHORT_DECODE, "piece": SHORT_PIECE} if context.short else {"decode": DECODE, "piece": PIECE}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = {}
        for number, (name, shape) in enumerate(shapes.items()):
            context.progress(f"kernels: {name}", number / len(shapes))
            cases[name] = _measure(AttentionCase(heads, shape, context.seed), 1 if context.short else 6)
    finally:
        torch.set_num_threads(before)
    decode = cases["decode"]
    best = "native" if "native" in decode else "reference"
    moved = decode["gathered"].moved / decode[best].moved
    return Findings(
        experiment="kernels",
        title="Kernels: through the block table, or gather first",
        summary=(
            f"Gathering the blocks first moves {moved:.1f} times the bytes of the {best} kernel and takes "
            f"{decode['gathered'].seconds / decode[best].seconds:.1f} times as long in a decode step; all kernels give "
            f"the same numbers up to {max(one.error for case in cases.values() for one in case.values()):.1e}."
        ),
        claims=_claims(cases, best),
        tables=tuple(_table(name, shapes[name], case) for name, case in cases.items()),
        charts=(_chart(cases),),
        figures={
            f"{name}.{kernel}.{field}": value
            for name, case in cases.items()
            for kernel, one in case.items()
            for field, value in (
                ("seconds", round(one.seconds, 6)),
                ("moved_bytes", one.moved),
                ("copied_bytes", one.extra),
                ("largest_difference", one.error),
            )
        },
    )


def _measure(case: AttentionCase, rounds: int) -> dict[str, Measured]:
    gathered = GatheredAttention()
    backends: dict[str, AttentionBackend] = {"gathered": gathered, "reference": ReferenceAttention()}
    if native.instruction_set(case.shape.block_size, case.geometry.head_dim) is not None:
        backends["native"] = CpuAttention(1)
    works: dict[str, Callable[[], torch.Tensor]] = {}
    for name, backend in backends.items():
        works[name] = case.prepared(backend, case.pool().layer)
    answers = {name: work() for name, work in works.items()}
    seconds = quickest(works, rounds)
    measured: dict[str, Measured] = {}
    for name, work in works.items():
        with TorchTraffic() as traffic:
            work()
        moved = case.kv_bytes + case.row_bytes if name == "native" else traffic.num_bytes
        extra = gathered.copied_bytes if name == "gathered" else 0
        error = float((answers[name] - answers["reference"]).abs().max())
        assert error < TOLERANCE, f"{name} differs from the reference by {error}"
        measured[name] = Measured(seconds[name], moved, extra, error)
    return measured


def _claims(cases: dict[str, dict[str, Measured]], best: str) -> tuple[Claim, ...]:
    decode = cases["decode"]
    gathered, quick = decode["gathered"], decode[best]
    worst = max(one.error for case in cases.values() for one in case.values())
    slower = gathered.seconds / quick.seconds
    loop, piece = (case["reference"].seconds / case[best].seconds for case in (decode, cases["piece"]))
    return (
        Claim(
            "2.4",
            "A kernel reads KV through the block table, block by block, and merges with a decay factor",
            "the numbers of attention over contiguous KV",
            f"gathered, reference and native kernels differ by at most {worst:.1e}",
            Verdict.CONFIRMED,
        ),
        Claim(
            "5.3",
            "Slower although memory fell: the kernel gathers first and then computes",
            "gathering costs bytes and time",
            f"a decode step: {_mib(gathered.moved)} moved instead of {_mib(quick.moved)}, {slower:.1f} times the time "
            f"of the {best} kernel, and {_mib(gathered.extra)} of copies",
            Verdict.CONFIRMED if slower > 1.2 and gathered.moved > quick.moved else Verdict.NOT_CONFIRMED,
        ),
        Claim(
            "2.4",
            "First a plain loop that is right, then tiling",
            "the plain form is slow, and the oracle for the fast one",
            f"the reference takes {loop:.1f} times as long as the {best} kernel in a decode step, {piece:.1f} times in "
            "a prefill piece, and both agree",
            Verdict.CONFIRMED if best == "native" else Verdict.DEPENDS,
        ),
    )


def _table(name: str, shape: CaseShape, case: dict[str, Measured]) -> Table:
    return Table(
        title=f"{name}: {shape.sequences} x {shape.rows} queries over {shape.length:,} tokens each, one layer, float32",
        header=("kernel", "milliseconds", "bytes moved", "KV copied out of its blocks", "largest difference"),
        rows=tuple(
            (kernel, f"{1e3 * one.seconds:.2f}", _mib(one.moved), _mib(one.extra), f"{one.error:.1e}")
            for kernel, one in case.items()
        ),
        note="One thread. Bytes: of the tensors that each operation reads and writes; the native kernel reads KV "
        "once. The reference copies too, but one tile of 256 positions at a time.",
    )


def _chart(cases: dict[str, dict[str, Measured]]) -> Chart:
    kernels = tuple(cases["decode"])
    places = tuple(float(place) for place in range(len(kernels)))
    return Chart(
        name="kernels-time",
        title="Time of one call",
        x_label="kernel",
        y_label="milliseconds",
        series=tuple(
            Series(name, places, tuple(1e3 * case[kernel].seconds for kernel in kernels))
            for name, case in cases.items()
        ),
        kind="bar",
        x_ticks=kernels,
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
