"""AttentionCall: what the prefill and the decode kernels are given, for one layer of one step.

Owns: the arguments that both share.
Does not: choose or check them (worker.kernels.triton.attention).
Invariants: query, out and layer_kv have stride 1 in their last dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker.kernels.triton.step_plan import StepPlan
from worker.kernels.triton.tile_shape import TileShape


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    query: Tensor  # [T, num_heads, head_dim]
    out: Tensor  # [T, num_heads, head_dim]
    layer_kv: Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    plan: StepPlan
    shape: TileShape
    scale: float  # with the factor log2(e)
    window: int  # positions a query sees, itself included
    constants: dict[str, Any]  # what the kernels are compiled for
