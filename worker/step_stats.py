"""StepStats: everything that is counted about one step and the state it left, in one frozen object.

Heartbeat, status line, metrics, simulator and bench all read this; nothing else counts.

Owns: the fields, and the load snapshot that a heartbeat carries.
Does not: measure (worker.engine) or travel (ReplicaLoad does).
Invariants: totals never decrease; block counts add up; uncached tokens are of live requests only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.core.replica import ReplicaLoad
from cluster.core.step_time import StepShape
from worker.kvcache.block_pool import BlockCounts

IDLE = StepShape(0, 0.0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTotals:
    """Since the engine started. query_tokens, hit_tokens: prompt tokens looked up and found, each request once.

    expired_requests: ended by their deadline.  refused_requests: not let in.  loaded_s: of steps that prefilled or left
    somebody waiting.
    """

    steps: int = 0
    loaded_s: float = 0.0
    query_tokens: int = 0
    hit_tokens: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    expired_requests: int = 0
    refused_requests: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """shape, seconds: of the step; nothing and 0 when there was none.

    held: of the waiting ones, those that wait for a prefix.  uncached_tokens: router id -> tokens still to prefill.
    step_time_s, prefill_tokens_per_s: recent means.  step_time_model: its five coefficients, or nothing while unknown.
    """

    shape: StepShape = IDLE
    seconds: float = 0.0
    waiting: int = 0
    held: int = 0
    running: int = 0
    paused: bool = False
    draining: bool = False
    uncached_tokens: Mapping[str, int] = field(default_factory=dict)
    blocks: BlockCounts
    totals: EngineTotals
    step_time_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    step_time_model: tuple[float, ...] = ()

    def load(self) -> ReplicaLoad:
        totals, blocks = self.totals, self.blocks
        return ReplicaLoad(
            waiting=self.waiting,
            held=self.held,
            running=self.running,
            paused=self.paused,
            draining=self.draining,
            uncached_tokens=dict(self.uncached_tokens),
            free_blocks=blocks.free,
            cached_blocks=blocks.cached,
            in_use_blocks=blocks.in_use,
            total_blocks=blocks.total,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            step_time_s=self.step_time_s,
            step_time_model=self.step_time_model,
            loaded_s=totals.loaded_s,
            query_tokens=totals.query_tokens,
            hit_tokens=totals.hit_tokens,
            generated_tokens=totals.generated_tokens,
            finished_requests=totals.finished_requests,
            expired_requests=totals.expired_requests,
            refused_requests=totals.refused_requests,
            preemptions=totals.preemptions,
        )
