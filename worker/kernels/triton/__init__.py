"""Paged attention in Triton, the backend for CUDA devices that needs no compiler but Triton's own.

    addressing      where a slot lies in the pool            kv_write        new keys and values into their slots
    query_rows      the rows of one program                  block_copy      whole blocks onto others
    tile_attention  one tile of 256 positions, and merging   step_plan       a step's work lists, made once per step
    prefill         long spans: a program per query tile     tile_shape      how much one program holds
    decode          short spans: a program per KV tile       attention_call  what the two are given
    fixed_plan      the work lists of a captured decode step

Owns: saying whether Triton can be used, and handing out the backend.
Does not: choose among backends (worker.kernels), or import triton before one of these functions is called.
Invariants: without triton installed this package imports, and `why_missing` says why it cannot be used.
"""

from __future__ import annotations

from worker.kernels.base import AttentionBackend
from worker.kernels.flash.slot_writer import KvWriter


def why_missing() -> str:
    """Empty when triton can be imported, else the reason in one line."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    return ""


def triton_attention() -> AttentionBackend:
    """A new backend for one engine. Raises ImportError when triton is not installed."""
    from worker.kernels.triton.attention import TritonAttention

    return TritonAttention()


def kv_writer() -> KvWriter:
    """The kernel that puts new keys and values into their slots, for other backends. Raises ImportError, too."""
    from worker.kernels.triton.kv_write import write_kv

    return write_kv
