"""What the native kernels reach, as shares of what the machine gives in the same run: memory reads and products.

    decode attention    8 sequences of 4,096 tokens, one query each: bytes of KV per second, beside a plain read
    prefill attention   a piece of 512 tokens at the end of 4,096: FLOP per second, beside a matrix product
    products            the demo model's matrices, 1 to 512 rows, weights out of memory (a new matrix at every call)

Every figure is the best of several passes, and passes of all kinds take turns: other work on the machine only slows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from worker.kernels import machine_limits, native
from worker.kernels.base import AttentionMetadata, SequenceSpan
from worker.kernels.cpu import CpuAttention
from worker.kvcache.kv_pool import KvGeometry, KvPool

HEADS, KV_HEADS, HEAD_DIM, BLOCK, CONTEXT, LAYERS = 9, 3, 64, 16, 4096, 4
SHAPES = {"qkv": (960, 576), "out": (576, 576), "gate+up": (3072, 576), "down": (576, 1536)}
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
COLD_BYTES = 64 << 20  # weights of one kind, together larger than the last cache


def best(passes: int, work: Callable[[], object]) -> float:
    seconds = float("inf")
    for _ in range(passes):
        started = time.perf_counter()
        work()
        seconds = min(seconds, time.perf_counter() - started)
    return seconds


class AttentionBench:
    """One layer's attention over a pool with several layers, through the block tables in random order."""

    def __init__(self, dtype: str, threads: int, sequences: int, rows: int) -> None:
        self._kernel = CpuAttention(threads)
        geometry = KvGeometry(
            num_layers=LAYERS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            block_size=BLOCK,
            dtype=getattr(torch, dtype),
        )
        blocks = CONTEXT // BLOCK
        self._pool = KvPool(geometry, sequences * blocks, torch.device("cpu"))
        self._pool.tensor.zero_()
        tables = torch.randperm(sequences * blocks).split(blocks)
        total = sequences * rows
        self._query = torch.randn(total, HEADS, HEAD_DIM).to(geometry.dtype)
        self._key, self._value = (torch.randn(total, KV_HEADS, HEAD_DIM).to(geometry.dtype) for _ in range(2))
        spans = (
            SequenceSpan(row=i * rows, count=rows, start=CONTEXT - rows, block_table=table)
            for i, table in enumerate(tables)
        )
        self._metadata = AttentionMetadata(spans=tuple(spans), slot_mapping=torch.zeros(total, dtype=torch.int64))
        self.bytes = self._pool.num_bytes // LAYERS
        seen = sum(range(CONTEXT - rows + 1, CONTEXT + 1))
        self.flop = 4.0 * HEADS * HEAD_DIM * seen * sequences
        self._layer = 0

    def run(self) -> None:
        self._layer = (self._layer + 1) % LAYERS
        layer = self._pool.layer(self._layer)
        self._kernel.forward(self._query, self._key, self._value, layer, self._metadata, scale=0.125)


def products(dtype: str, threads: int) -> list[str]:
    lines = ["| matrix | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |", "|---|" + "---:|" * len(ROWS)]
    pool = native.thread_pool(threads)
    for name, (outputs, inputs) in SHAPES.items():
        weight = torch.randn(outputs, inputs).to(getattr(torch, dtype))
        matrices = [
            native.module().Matrix(pool, "", dtype, weight, None, name == "gate+up")
            for _ in range(max(1, COLD_BYTES // weight.nbytes))
        ]
        cells = []
        for rows in ROWS:
            x = torch.randn(rows, inputs)
            y = torch.empty(rows, outputs // 2 if name == "gate+up" else outputs)
            count = len(matrices) if rows <= 32 else max(2, len(matrices) // 8)

            def work(x: torch.Tensor = x, y: torch.Tensor = y, some: list[object] = matrices[:count]) -> None:
                for matrix in some:
                    matrix.multiply(x, y)  # type: ignore[attr-defined]

            seconds = best(5, work)
            flop, read = 2.0 * rows * outputs * inputs * count, weight.nbytes * count
            cells.append(f"{read / seconds / 1e9:.1f} GB/s" if rows < 4 else f"{flop / seconds / 1e9:.0f} GF/s")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--passes", type=int, default=5, help="rounds over all measurements")
    options = parser.parse_args()
    dtype, threads = options.dtype, options.threads
    torch.set_num_threads(1)
    decode, prefill = AttentionBench(dtype, threads, 8, 1), AttentionBench(dtype, threads, 1, 512)
    reads, products_rate, decodes, prefills = [], [], [], []
    for _ in range(options.passes):
        reads.append(machine_limits.read_bandwidth(decode.bytes * LAYERS, threads))
        decodes.append(decode.bytes / best(2 * LAYERS, decode.run))
        products_rate.append(machine_limits.gemm_rate(dtype, threads))
        prefills.append(prefill.flop / best(4, prefill.run))
    instruction_set = native.instruction_set(BLOCK, HEAD_DIM)
    print(f"{dtype}, {threads} threads, kernels: {instruction_set}; best of {options.passes} rounds\n")
    print("| what | reached | limit in this run | share |\n|---|---:|---:|---:|")
    print(
        f"| decode attention | {max(decodes) / 1e9:.1f} GB/s | read {max(reads) / 1e9:.1f} GB/s "
        f"| {max(decodes) / max(reads):.0%} |"
    )
    print(
        f"| prefill attention | {max(prefills) / 1e9:.0f} GF/s | product {max(products_rate) / 1e9:.0f} GF/s "
        f"| {max(prefills) / max(products_rate):.0%} |\n"
    )
    print("\n".join(products(dtype, threads)))


if __name__ == "__main__":
    main()
