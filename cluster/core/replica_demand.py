"""ReplicaDemand: what an autoscaler hears of one replica, as six numbers.

Owns: deriving them from a ReplicaLoad on the step-time model, their names on the wire, and refusing nonsense.
Does not: decide anything (autoscaling_policy) or travel (worker.deployment, cluster.autoscaling).
Invariants: every number is finite and 0 or more; a report in which one is not, or is missing, is no report at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cluster.core.replica import ReplicaLoad
from cluster.core.step_time import StepTimeModel

_MOST_S = 1e9  # no queue, and no life of a replica, is longer than 30 years
_MOST_REQUESTS = 1e15
_LIMITS = {
    "queued_s": _MOST_S,
    "loaded_s": _MOST_S,
    "kv_share": 1.0,
    "seat_share": 1e6,
    "answered": _MOST_REQUESTS,
    "late": _MOST_REQUESTS,
}


class ReplicaDemand(NamedTuple):
    """queued_s: prefill compute that waits or is under way, with what decodes beside it.

    loaded_s: since the replica started, the time in which it prefilled or somebody waited.  kv_share: of its KV memory,
    what live requests hold.  seat_share: live requests, each of which needs one of `max_num_seqs` places.
    answered, late: since then, requests that got a first token, and those of them that got it after the TTFT target.
    """

    queued_s: float = 0.0
    loaded_s: float = 0.0
    kv_share: float = 0.0
    seat_share: float = 0.0
    answered: float = 0.0
    late: float = 0.0

    def to_numbers(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._asdict().items()}

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, float]) -> ReplicaDemand | None:
        """None unless all are there and possible."""
        for name, most in _LIMITS.items():
            value = numbers.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= most:
                return None
        return cls(*(float(numbers[name]) for name in cls._fields))


def demand_of(
    load: ReplicaLoad, *, token_budget: int, max_num_seqs: int, block_size: int, answered: int, late: int
) -> ReplicaDemand:
    """`token_budget`, `max_num_seqs`, `block_size`: of the replica's engine."""
    tokens = load.total_uncached_tokens
    live = load.waiting + load.running
    return ReplicaDemand(
        queued_s=min(_prefill_seconds(load, tokens, token_budget, block_size), _MOST_S) if tokens else 0.0,
        loaded_s=load.loaded_s,
        kv_share=min(load.in_use_blocks / load.total_blocks, 1.0) if load.total_blocks else 0.0,
        seat_share=live / max_num_seqs,
        answered=answered,
        late=late,
    )


def _prefill_seconds(load: ReplicaLoad, tokens: int, token_budget: int, block_size: int) -> float:
    """Of prompts that are about equally long. Without a model, at the measured rate; 0 before anything was measured."""
    if not load.step_time_model:
        return tokens / load.prefill_tokens_per_s if load.prefill_tokens_per_s > 0 else 0.0
    model = StepTimeModel(*load.step_time_model)
    per_prompt = tokens / max(load.waiting, 1)
    beside = model.base + model.per_decode_seq * load.running
    beside += model.per_decode_context * load.in_use_blocks * block_size
    return (
        model.per_prefill_token * tokens
        + model.per_prefill_context * tokens * per_prompt / 2
        + beside * -(-tokens // token_budget)
    )
