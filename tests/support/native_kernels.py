"""The instruction sets that this machine can test, and memory that is not by chance right before it is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from worker.kernels import native

INSTRUCTION_SETS: tuple[str, ...] = tuple(native.module().available()) if native.module() is not None else ()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = "avx512bf16"  # rounds activations to bfloat16 when the weights are


def rounds(instruction_set: str, dtype: torch.dtype) -> bool:
    return instruction_set == ROUNDING and dtype == torch.bfloat16


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, torch.empty gives NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
