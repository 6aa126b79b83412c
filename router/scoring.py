"""Scoring: which replica gives the first token soonest.

The estimate of a replica is (uncached tokens already ahead there + this prompt's own uncached tokens) / its prefill
rate. Replicas whose estimates are within `near_tie` of the best are equal; among them the larger overlap wins,
then the fewer running sequences, then chance.

Owns: Candidate, Score, and the policies behind one protocol. Pure arithmetic, no ray, no redis.
Does not: look anything up (router.routing_state gathers candidates) or book load.
Invariants: every candidate appears once in a ranking; a policy sees only what Candidate carries.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.core.replica import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica as one request sees it.

    overlap_tokens: prompt tokens it already holds.  ahead_tokens: uncached tokens queued or running before this
    request.  prefill_tokens_per_s: its recent rate, 0 while unknown.  lost: it failed us and has not come back, or it
    runs nothing now (paused): the last choice.
    """

    worker_id: WorkerId
    overlap_tokens: int = 0
    ahead_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    running: int = 0
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """`cost` is comparable within one ranking only; for estimated_ttft it is seconds."""

    candidate: Candidate
    cost: float


class Policy(Protocol):
    def rank(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[Score]:
        """All candidates, best first."""


class EstimatedTtft:
    """Lowest estimated time to first token; near-ties go to the larger overlap."""

    def __init__(self, default_rate: float, near_tie: float, rng: random.Random) -> None:
        self._default_rate = default_rate
        self._near_tie = near_tie
        self._rng = rng

    def rank(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[Score]:
        known = [c.prefill_tokens_per_s for c in candidates if c.prefill_tokens_per_s > 0]
        fallback = sum(known) / len(known) if known else self._default_rate
        costs = {
            c.worker_id: (c.ahead_tokens + max(prompt_tokens - c.overlap_tokens, 1))
            / (c.prefill_tokens_per_s or fallback)
            for c in candidates
        }
        best = min((costs[c.worker_id] for c in candidates if not c.lost), default=0.0)
        bound = best * (1 + self._near_tie)

        def key(c: Candidate) -> tuple[bool, float, int, int, float]:
            cost = costs[c.worker_id]
            return (c.lost, 0.0 if cost <= bound else cost, -c.overlap_tokens, c.running, self._rng.random())

        return [Score(c, costs[c.worker_id]) for c in sorted(candidates, key=key)]


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


def create_policy(name: str, *, default_rate: float, near_tie: float, rng: random.Random) -> Policy:
    if name == "estimated_ttft":
        return EstimatedTtft(default_rate, near_tie, rng)
    if name == "least_uncached":
        return LeastUncached(rng)
    if name == "round_robin":
        return RoundRobin()
    raise ValueError(f"unknown routing policy {name!r}")
