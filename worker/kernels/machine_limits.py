"""What this machine can do at most, measured the way the kernels use it: memory reads and matrix products.

Owns: read_bandwidth and gemm_rate.
Does not: judge anything by them (cluster.bench does) or run in a server.
Invariants: the same threads and huge pages as the engine; the best of several passes, since other work only slows.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from worker.kernels import native

_PASSES = 8
_ROWS, _INNER, _OUTER = 512, 1536, 3072


def read_bandwidth(num_bytes: int, threads: int) -> float:
    """Bytes per second at which `threads` threads read a buffer of `num_bytes`."""
    times: list[float] = native.module().read_times(native.thread_pool(threads), num_bytes, _PASSES)
    return num_bytes / min(times)


def gemm_rate(dtype: str, threads: int) -> float:
    """FLOP per second of the faster of torch's matrix product and ours, for a prefill piece of 512 rows."""
    return max(_torch_rate(dtype, threads), _native_rate(dtype, threads))


def _native_rate(dtype: str, threads: int) -> float:
    weight = torch.randn(_OUTER, _INNER).to(getattr(torch, dtype))
    matrix = native.module().Matrix(native.thread_pool(threads), "", dtype, weight)
    rows, out = torch.randn(_ROWS, _INNER), torch.empty(_ROWS, _OUTER)
    return _rate(lambda: matrix.multiply(rows, out))


def _torch_rate(dtype: str, threads: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weight = torch.randn(_OUTER, _INNER).to(getattr(torch, dtype))
        rows = torch.randn(_ROWS, _INNER).to(weight.dtype)
        return _rate(lambda: torch.nn.functional.linear(rows, weight))
    finally:
        torch.set_num_threads(before)


def _rate(multiply: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_PASSES):
        started = time.perf_counter()
        multiply()
        best = min(best, time.perf_counter() - started)
    return 2.0 * _ROWS * _INNER * _OUTER / best
