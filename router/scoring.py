"""Scoring: what a policy sees of a replica, what it says of it, and the policies by name.

Owns: Candidate, Score, the Policy protocol, the two simple policies, and `create_policy`.
Does not: look anything up (router.routing_state gathers candidates), book load, or estimate (router.estimated_ttft).
Invariants: every candidate appears once in a ranking; a policy sees only what Candidate carries. Pure arithmetic, no
ray, no redis.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cluster.core.replica import WorkerId
from cluster.core.step_time import StepTimeModel
from router.own_work import NO_WORK, Work


class Candidate(NamedTuple):
    """A replica as one request sees it.

    overlap_tokens: prompt tokens it already holds.  ahead_tokens: uncached tokens queued or running before this
    request.  prefill_tokens_per_s: its recent rate, 0 while unknown.  lost: it failed us and has not come back, or it
    runs nothing now (paused) or is about to stop: the last choice.  running: its requests, of all routers.
    work: of this router's requests there.  others_tokens: of `ahead_tokens`, those of other routers.
    step_time: its model, None while unknown.  waiting: its queue.  kv_in_use, kv_free: shares of its blocks that live
    requests hold, and that hold nothing.  requests: this router's live ones.
    hot_tokens: of a prefix that many ask for and one other replica has: a second copy of it is not charged.
    kv_tokens: what its memory holds, 0 while unknown.
    """

    worker_id: WorkerId
    overlap_tokens: int = 0
    ahead_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    running: int = 0
    lost: bool = False
    work: Work = NO_WORK
    others_tokens: int = 0
    step_time: StepTimeModel | None = None
    waiting: int = 0
    kv_in_use: float = 0.0
    kv_free: float = 0.0
    requests: int = 0
    hot_tokens: int = 0
    kv_tokens: int = 0


class Score(NamedTuple):
    """`cost` is comparable within one ranking only.  own_s: compute seconds of this request there, where estimated."""

    candidate: Candidate
    cost: float
    own_s: float = 0.0


class Policy(Protocol):
    def rank(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[Score]:
        """All candidates, best first."""


class LeastUncached:
    """Fewest uncached tokens ahead, blind to what is cached."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[Score]:
        ranked = sorted(candidates, key=lambda c: (c.lost, c.ahead_tokens, c.running, self._rng.random()))
        return [Score(c, float(c.ahead_tokens)) for c in ranked]


class RoundRobin:
    """In turn, by worker id."""

    def __init__(self) -> None:
        self._turn = 0

    def rank(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[Score]:
        ordered = sorted(candidates, key=lambda c: c.worker_id)
        start = self._turn % max(len(ordered), 1)
        self._turn += 1
        turned = sorted(ordered[start:] + ordered[:start], key=lambda c: c.lost)
        return [Score(c, float(place)) for place, c in enumerate(turned)]
