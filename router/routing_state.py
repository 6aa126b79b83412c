"""RoutingState: everything one router process knows when it chooses a replica, and the one place that chooses.

Serve pickles the router class's module by value, so live state must sit in another module: this one. The ingress
installs the state of its process; PrefixAwareRouter finds it here.

Owns: gathering candidates (overlap from the index, load from ledger and heartbeats), the last decisions, and which
replicas failed us.
Does not: talk to Redis (cluster.index.follower), to Ray (prefix_router) or do arithmetic (scoring).
Invariants: one state per process and deployment; used on one event loop; own requests are counted from the ledger,
everybody else's from heartbeats, so nothing is counted twice; a replica that is gone keeps no overlap.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, WorkerId
from cluster.index.follower import IndexFollower
from cluster.index.memory import MemoryIndex
from router.generation import ReplicaStatus
from router.route_ledger import RouteLedger
from router.scoring import Candidate, Policy, Score

NO_EPOCH = Epoch(0)
_KEPT_DECISIONS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteHint:
    """What the ingress passes to the router beside the request; the router pops it before dispatch."""

    request_id: str
    chunk_hashes: tuple[ChunkHash, ...]
    prompt_tokens: int
    exclude: frozenset[WorkerId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteDecision:
    hint: RouteHint
    ranking: tuple[Score, ...]
    at: float


@dataclass(slots=True)
class RoutingState:
    router_id: str
    index: MemoryIndex
    follower: IndexFollower
    ledger: RouteLedger
    policy: Policy
    chunk_tokens: int
    clock: Callable[[], float] = time.monotonic
    decisions: deque[RouteDecision] = field(default_factory=lambda: deque(maxlen=_KEPT_DECISIONS))
    lost: set[WorkerId] = field(default_factory=set)

    def decide(self, hint: RouteHint, worker_ids: Sequence[WorkerId]) -> list[WorkerId]:
        """Rank the replicas that Serve offers, book the request on the best, and remember why."""
        held = self._overlaps(hint)
        candidates = [self._candidate(worker_id, hint, held.get(worker_id, 0)) for worker_id in worker_ids]
        ranking = self.policy.rank(hint.prompt_tokens, candidates)
        if ranking:
            self.decisions.append(RouteDecision(hint=hint, ranking=tuple(ranking), at=self.clock()))
            self._book(hint, ranking[0].candidate)
        return [score.candidate.worker_id for score in ranking]

    def routed(self, hint: RouteHint, worker_id: WorkerId) -> None:
        """Serve dispatched to `worker_id`, perhaps not our first choice: move the booking."""
        life = self.ledger.booked_on(hint.request_id)
        if life is not None and life[0] != worker_id:
            self._book(hint, self._candidate(worker_id, hint, self._overlaps(hint).get(worker_id, 0)))

    def mark_lost(self, worker_id: WorkerId) -> None:
        """The replica died or its engine did: credit nothing to it from now on."""
        self.lost.add(worker_id)
        self.follower.drop(worker_id)

    def keep_only(self, worker_ids: Sequence[WorkerId]) -> None:
        """Serve's current replicas: forget losses of those that no longer exist."""
        self.lost &= set(worker_ids)

    def max_model_len(self) -> int | None:
        """The longest request every known replica accepts; None while none is known."""
        return min((w.info.max_model_len for w in self.follower.workers.values()), default=None)

    def replicas(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(
                info=w.info, epoch=w.epoch, load=w.load, indexed_chunks=self.index.chunk_count(w.info.worker_id)
            )
            for w in self.follower.workers.values()
        ]

    def ready(self) -> bool:
        return self.follower.ready and bool(self.follower.workers)

    def epoch_of(self, worker_id: WorkerId) -> Epoch:
        known = self.follower.workers.get(worker_id)
        return NO_EPOCH if known is None else known.epoch

    def _overlaps(self, hint: RouteHint) -> dict[WorkerId, int]:
        """Chunks held, by worker; nothing before the index is complete."""
        return self.index.overlaps(hint.chunk_hashes) if self.follower.ready else {}

    def _candidate(self, worker_id: WorkerId, hint: RouteHint, chunks: int) -> Candidate:
        known = self.follower.workers.get(worker_id)
        own = self.ledger.uncached_tokens(worker_id, self.epoch_of(worker_id))
        own_requests = self.ledger.requests(worker_id, self.epoch_of(worker_id))
        if hint.request_id and self.ledger.booked_on(hint.request_id) == (worker_id, self.epoch_of(worker_id)):
            own -= self.ledger.booked_tokens(hint.request_id)  # not ahead of itself when Serve asks again
            own_requests -= 1
        others, rate, running = 0, 0.0, own_requests
        if known is not None:
            others = known.load.total_uncached_tokens - known.load.uncached_tokens.get(self.router_id, 0)
            rate = known.load.prefill_tokens_per_s
            running = max(own_requests, known.load.running + known.load.waiting)
        return Candidate(
            worker_id=worker_id,
            overlap_tokens=min(chunks * self.chunk_tokens, max(hint.prompt_tokens - 1, 0)),
            ahead_tokens=own + others,
            prefill_tokens_per_s=rate,
            running=running,
            lost=worker_id in self.lost or worker_id in hint.exclude,
        )

    def _book(self, hint: RouteHint, candidate: Candidate) -> None:
        tokens = hint.prompt_tokens - candidate.overlap_tokens
        self.ledger.book(hint.request_id, candidate.worker_id, self.epoch_of(candidate.worker_id), tokens)


_states: dict[str, RoutingState] = {}


def install(deployment: str, state: RoutingState) -> None:
    """Make `state` the one of this process for the named worker deployment."""
    _states[deployment] = state


def installed(deployment: str) -> RoutingState | None:
    return _states.get(deployment)
