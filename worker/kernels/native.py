"""The native kernels' module, when this installation has it, and the threads they run on.

Owns: importing `worker.kernels._cpu` (C++, built with the wheel), the reason when it is missing, and its thread pool.
Does not: compute; `worker.kernels.cpu` and `worker.models.cpu_decoder` do.
Invariants: without the module everything works, slower; one pool per process and thread count.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

try:
    _cpu: Any = importlib.import_module("worker.kernels._cpu")  # built by CMake; absent in the pure wheel
except ImportError as error:
    _cpu = None
    _reason = f"the native kernels are not built in ({error})"
else:
    _reason = ""

MAX_BLOCK_SIZE = 256  # positions of one attention tile; a block must divide it
MAX_HEAD_DIM = 1024


def module() -> Any:
    """The compiled module, or None."""
    return _cpu


def why_missing() -> str:
    return _reason


def instruction_set(block_size: int, head_dim: int, wanted: str = "") -> str | None:
    """The best instruction set for these sizes, at most `wanted` ("" means no limit); None when none fits."""
    if _cpu is None or MAX_BLOCK_SIZE % block_size or head_dim > MAX_HEAD_DIM:
        return None
    return _cpu.fitting(wanted, block_size, head_dim) or None


@functools.cache
def thread_pool(threads: int) -> Any:
    return _cpu.ThreadPool(threads)
