"""`make flash-env` runs this: does the installed vllm-flash-attn still have the contract that our adapter relies on?

    python -m worker.kernels.flash.contract_check        from the root of the tree; kvray need not be installed

Owns: three checks without a GPU (import, parameter names, how far a call on CPU tensors comes) and one with it.
Does not: need more of kvray than worker.kernels, which needs only torch.
Invariants: one line per check; the exit code is 1 when one failed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from worker.kernels.base import AttentionBackend, AttentionMetadata, SequenceSpan
from worker.kernels.flash.backend import FlashAttention
from worker.kernels.flash.calls import adapt
from worker.kernels.reference import ReferenceAttention

PARAMETERS = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p", "softmax_scale"),
    *("causal", "window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs", "block_table", "out"),
)
_NO_DEVICE = ("NVIDIA", "CUDA")
_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 6, 2, 64, 16
_MIXED = ((0, 33), (40, 1), (0, 1), (300, 70), (15, 1))  # (cached, new) of each sequence: pieces and decode rows
_DECODE = ((40, 1), (300, 1), (15, 1))  # the package regroups the heads of such a batch
_TOLERANCE = 2e-2  # of bfloat16 outputs


def main() -> int:
    try:
        package = importlib.import_module("vllm_flash_attn")
    except (ImportError, OSError) as error:
        print(f"FAILED  import: {error}")
        return 1
    print(f"ok      import: vllm_flash_attn {package.__version__} with torch {torch.__version__}")
    function = package.flash_attn_varlen_func
    on_device = on_cuda if torch.cuda.is_available() else on_cpu
    checks = [
        ("parameters", lambda: parameters(function)),
        ("a wrong argument", lambda: wrong_argument(function)),
        (f"call on {'cuda' if on_device is on_cuda else 'cpu'}", lambda: on_device(function)),
    ]
    passed = [_report(name, check) for name, check in checks]
    return 0 if all(passed) else 1


def _report(name: str, check: Callable[[], str]) -> bool:
    try:
        print(f"ok      {name}: {check()}")
    except AssertionError as error:
        print(f"FAILED  {name}: {error}")
        return False
    return True


def parameters(function: Callable[..., Any]) -> str:
    found = tuple(inspect.signature(function).parameters)
    if found != PARAMETERS:
        raise AssertionError(f"expected {', '.join(PARAMETERS)}; found {', '.join(found)}")
    return f"the {len(found)} expected names"


def wrong_argument(function: Callable[..., Any]) -> str:
    """That the native code checks argument types first, so that on_cpu means something."""

    @functools.wraps(function)
    def with_text(**named: Any) -> Any:
        return function(**named | {"max_seqlen_q": "1"})

    world = _World(_MIXED, torch.device("cpu"))
    try:
        world.step(FlashAttention(adapt(with_text, "vllm_flash_attn")))
    except TypeError:
        return "TypeError from the native binding"
    except RuntimeError as error:
        raise AssertionError(f"expected TypeError, got {_first_line(error)}") from None
    raise AssertionError("it was accepted")


def on_cpu(function: Callable[..., Any]) -> str:
    """Without a device, our arguments must pass the Python wrapper and the binding, and stop at the device."""
    world = _World(_MIXED, torch.device("cpu"))
    for options in ({}, {"sliding_window": 20}, {"softcap": 5.0}):
        try:
            world.step(FlashAttention(adapt(function, "vllm_flash_attn")), **options)
        except TypeError as error:
            raise AssertionError(f"the binding refuses our arguments: {error}") from None
        except RuntimeError as error:
            if not any(word in str(error) for word in _NO_DEVICE):
                raise AssertionError(f"an unexpected error: {_first_line(error)}") from None
            found = _first_line(error)
        else:
            raise AssertionError("it computed on CPU tensors")
    return f"arguments accepted, then stopped at the device ({found})"


def on_cuda(function: Callable[..., Any]) -> str:
    """With a device, the numbers must be those of the reference backend."""
    largest = 0.0
    for spans in (_MIXED, _DECODE):
        world = _World(spans, torch.device("cuda"))
        for options in ({}, {"sliding_window": 20}, {"softcap": 5.0}):
            expected = world.step(ReferenceAttention(), **options)
            found = world.step(FlashAttention(adapt(function, "vllm_flash_attn")), **options)
            largest = max(largest, float((found.float() - expected.float()).abs().max()))
    if not largest < _TOLERANCE:  # also when it is NaN
        raise AssertionError(f"differs from the reference by {largest:.3g}")
    return f"differs from the reference by at most {largest:.3g}"


class _World:
    """One step over a pool of two layers, with every block in disorder and NaN in the blocks of nobody."""

    def __init__(self, spans: Sequence[tuple[int, int]], device: torch.device) -> None:
        torch.manual_seed(1)
        sizes = [-(-(cached + new) // _BLOCK_SIZE) for cached, new in spans]
        blocks = torch.randperm(sum(sizes) + 2)
        pool = torch.randn(len(blocks), 2, 2, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM).to(torch.bfloat16)
        pool[blocks[sum(sizes) :]] = float("nan")
        self.layer = pool.to(device)[:, 1]
        rows, slots, parts = 0, [], []
        for (cached, new), table in zip(spans, blocks[: sum(sizes)].split(sizes), strict=True):
            at = torch.arange(cached, cached + new)
            slots.append(table[at // _BLOCK_SIZE] * _BLOCK_SIZE + at % _BLOCK_SIZE)
            parts.append(SequenceSpan(row=rows, count=new, start=cached, block_table=table.to(device)))
            rows += new
        self.metadata = AttentionMetadata(tuple(parts), torch.cat(slots).to(device))
        shapes = [(rows, heads, _HEAD_DIM) for heads in (_HEADS, _KV_HEADS, _KV_HEADS)]
        self.rows = [torch.randn(shape).to(device, torch.bfloat16) for shape in shapes]

    def step(self, backend: AttentionBackend, **options: Any) -> torch.Tensor:
        q, k, v = self.rows
        return backend.forward(q, k, v, self.layer, self.metadata, scale=_HEAD_DIM**-0.5, **options)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
