"""Capture: from a function that launches device work to one that repeats the same launches.

Owns: the interface, and its form for CUDA graphs.
Does not: know what is captured.
Invariants: the work runs a few times before it is captured, so it must do no harm with what its inputs hold then; after
that it reads its inputs and writes its result where the capture did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], torch.Tensor]

_WARM_UPS = 2  # compiling, loading and tuning of kernels may not happen inside a capture


class Capture(Protocol):
    def __call__(self, work: Work, /) -> Work:
        """What repeats the launches of `work`; it returns the same tensor each time."""


class CudaCapture:
    """CUDA graphs that share their memory: a result is valid until any of them is replayed."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work, /) -> Work:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # others may use the device
            result = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
