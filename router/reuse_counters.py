"""ReuseCounters: the explanations of many requests, added up by reason, with the latest examples of each.

Owns: the sums, their metric names, and a few examples per reason.
Does not: explain (router.reuse_explanation) or decide when a request counts (router.reuse_watch).
Invariants: counters never fall; the examples are bounded and hold positions, never text.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from cluster.core.replica import WorkerId
from router.reuse_explanation import Loss, LossReason, ReuseExplanation

_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class LossExample:
    """prompt_tokens: of the whole prompt."""

    request_id: str
    worker_id: WorkerId
    prompt_tokens: int
    loss: Loss


@dataclass(slots=True)
class ReasonTotal:
    tokens: int = 0
    requests: int = 0
    examples: deque[LossExample] = field(default_factory=lambda: deque(maxlen=_EXAMPLES))


@dataclass(slots=True)
class ReuseCounters:
    """Tokens, of all requests that were answered."""

    requests: int = 0
    prompt: int = 0
    seen: int = 0
    held: int = 0
    chosen: int = 0
    reused: int = 0
    by_reason: dict[LossReason, ReasonTotal] = field(
        default_factory=lambda: {reason: ReasonTotal() for reason in LossReason}
    )

    def count(self, request_id: str, worker_id: WorkerId, explanation: ReuseExplanation) -> None:
        self.requests += 1
        self.prompt += explanation.prompt_tokens
        self.seen += explanation.seen_tokens
        self.held += explanation.held_tokens
        self.chosen += explanation.chosen_tokens
        self.reused += explanation.reused_tokens or 0
        for reason in {loss.reason for loss in explanation.losses}:
            self.by_reason[reason].requests += 1
        for loss in explanation.losses:
            total = self.by_reason[loss.reason]
            total.tokens += loss.tokens
            total.examples.append(LossExample(request_id, worker_id, explanation.prompt_tokens, loss))

    def metrics(self) -> dict[str, float]:
        return {
            "kvray_reuse_requests": self.requests,
            "kvray_reuse_tokens_prompt": self.prompt,
            "kvray_reuse_tokens_seen": self.seen,
            "kvray_reuse_tokens_held": self.held,
            "kvray_reuse_tokens_chosen": self.chosen,
            "kvray_reuse_tokens_reused": self.reused,
            **{f"kvray_reuse_lost_tokens_{reason}": total.tokens for reason, total in self.by_reason.items()},
            **{f"kvray_reuse_lost_requests_{reason}": total.requests for reason, total in self.by_reason.items()},
        }
