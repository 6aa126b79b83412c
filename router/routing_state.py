"""RoutingState: everything one router process knows when it chooses a replica, and the one place that chooses.

Serve pickles the router class's module by value, so live state must sit in another module: this one. The ingress
installs the state of its process; PrefixAwareRouter finds it here.

    decide   -> booked, and expected to be cached there soon
    answered -> prefilled: no load any more, cached for certain
    release  -> the request is over, however it ended

Owns: gathering candidates (overlap from the index, load from ledger and heartbeats), which replicas failed us, and
telling ledger, speculation, parity watch, reuse watch and the log of decisions the same story.
Does not: talk to Redis (cluster.index.follower), to Ray (prefix_router) or do arithmetic (scoring).
Invariants: one state per process and deployment; used on one event loop; own requests are counted from the ledger,
everybody else's from heartbeats, so nothing is counted twice; a replica that is gone keeps no overlap; a request is
never ahead of itself; nothing is kept of a request after `release`, but what its prefill left in the cache.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.core.replica import Epoch, WorkerId
from cluster.core.step_time import StepTimeModel
from cluster.index.base import NO_EPOCH
from cluster.index.follower import IndexFollower
from cluster.index.instrumented import InstrumentedIndex
from cluster.index.known import FollowerState, KnownWorker
from cluster.index.speculative import SpeculativeIndex
from router.decision_log import DecisionLog, RouteDecision
from router.fleet_speed import FleetSpeed
from router.generation import ReplicaStatus
from router.index_status import IndexStatus, WorkerIndexStatus, follower_metrics
from router.own_work import OwnWork
from router.parity_watch import ParityWatch, Promise
from router.readiness import Readiness, judge
from router.replica_lives import ReplicaLives
from router.reuse_counters import ReuseCounters
from router.reuse_watch import ReuseWatch
from router.route_explanation import RouteExplanation
from router.route_hint import RouteHint
from router.route_ledger import RouteLedger
from router.scoring import Candidate, Policy, Score

__all__ = ["NO_EPOCH", "RouteDecision", "RouteHint", "RoutingState", "install", "installed"]

_HOT_REQUESTS = 6  # live or just prefilled, that share a prefix: then it is worth a second copy


@dataclass(slots=True, eq=False)
class _View:
    """What one heartbeat says of a replica, worked out once for all decisions until the next.

    kv_tokens: what its memory holds.  unready: it is the last choice, as it runs nothing now or is about to stop.
    """

    known: KnownWorker
    epoch: Epoch
    step_time: StepTimeModel | None
    others_tokens: int
    busy: int
    waiting: int
    kv_in_use: float
    kv_free: float
    kv_tokens: int
    unready: bool


@dataclass(slots=True)
class RoutingState:
    """`parity` and `reuse` should be observers of `index`. `reuse` None: nothing is explained.

    offered: the replicas that Serve sends requests to; None while it has not said.
    starts_replicas: with none, a request brings one up and waits for it, so that none is no reason not to be ready.
    """

    router_id: str
    index: InstrumentedIndex
    follower: IndexFollower
    ledger: RouteLedger
    policy: Policy
    chunk_tokens: int
    speculative: SpeculativeIndex
    parity: ParityWatch
    clock: Callable[[], float] = time.monotonic
    reuse: ReuseWatch | None = None
    starts_replicas: bool = False
    lost: set[WorkerId] = field(default_factory=set)
    offered: frozenset[WorkerId] | None = None
    work: OwnWork = field(default_factory=OwnWork)
    _lives: ReplicaLives = field(init=False)
    _views: dict[WorkerId, _View] = field(default_factory=dict)
    _speeds: FleetSpeed = field(default_factory=FleetSpeed)
    _log: DecisionLog = field(init=False)

    def __post_init__(self) -> None:
        self._lives = ReplicaLives(self._continued, self._ended)
        self._log = DecisionLog(self.reuse, self.chunk_tokens, self._feed_late, self.clock)

    @property
    def decisions(self) -> deque[RouteDecision]:
        """The last ones."""
        return self._log.decisions

    def decide(self, hint: RouteHint, worker_ids: Sequence[WorkerId]) -> list[WorkerId]:
        """Rank the replicas that Serve offers, book the request on the best, and remember why."""
        self.release(hint.request_id)
        confirmed, held = self._overlaps(hint)
        hot = self._hot_chunks(hint, held)
        ranking = self.policy.rank(hint.prompt_tokens, self._candidates(worker_ids, hint, held, hot))
        if ranking:
            self._log.made(hint, ranking, held)
            self._book(hint, ranking[0], confirmed)
        return [score.candidate.worker_id for score in ranking]

    def preview(self, hint: RouteHint) -> RouteExplanation:
        """What `decide` would do now, if all known replicas were offered. Books nothing."""
        _, held = self._overlaps(hint)
        hot, worker_ids = self._hot_chunks(hint, held), [known.info.worker_id for known in self._own_workers()]
        policy = copy.deepcopy(self.policy)  # ranking may move its turn, or draw from its chance
        ranking = policy.rank(hint.prompt_tokens, self._candidates(worker_ids, hint, held, hot))
        return self._log.draft(hint, ranking, held).explanation(dry_run=True)

    def explained(self, request_id: str) -> RouteExplanation | None:
        """The latest decision on a request, by its own id or the client's, if it is among the last ones."""
        decision = self._log.find(request_id)
        return None if decision is None else decision.explanation()

    def misses(self) -> ReuseCounters:
        """Over all requests that were answered; zeros where nothing is explained."""
        return ReuseCounters() if self.reuse is None else self.reuse.settled()

    def routed(self, hint: RouteHint, worker_id: WorkerId) -> None:
        """Serve dispatched to `worker_id`, perhaps not our first choice: move the booking."""
        life = self.ledger.booked_on(hint.request_id)
        if life is not None and life[0] != worker_id:
            self.release(hint.request_id)
            confirmed, held = self._overlaps(hint)
            (candidate,) = self._candidates([worker_id], hint, held)
            self._log.moved(hint, candidate, held)
            self._book(hint, self.policy.rank(hint.prompt_tokens, [candidate])[0], confirmed)

    def answered(self, request_id: str, cached_tokens: int | None) -> str | None:
        """Its first token is here, with what the engine reused; None: it ended before the engine began.

        Returns what the client is told of its prompt's reuse."""
        self.ledger.prefill_done(request_id)
        self.work.answered(request_id, self.clock(), cached_tokens)
        self.parity.answered(request_id, cached_tokens)
        if cached_tokens is None:
            return None
        self.speculative.prefilled(request_id)
        explanation = None if self.reuse is None else self.reuse.answered(request_id, cached_tokens)
        return None if explanation is None else explanation.compact()

    def release(self, request_id: str) -> None:
        """It is over, or about to be routed again."""
        self.ledger.release(request_id)
        self.work.release(request_id, self.clock())
        self.parity.forget(request_id)
        self.speculative.withdraw(request_id)
        if self.reuse is not None:
            self.reuse.forget(request_id)

    def mark_lost(self, worker_id: WorkerId) -> None:
        """The replica died or its engine did: credit nothing to it until it registers a new life."""
        self.lost.add(worker_id)
        self.follower.drop(worker_id)
        self._views.pop(worker_id, None)
        self._lives.lost(worker_id)

    def keep_only(self, worker_ids: Sequence[WorkerId]) -> None:
        """Serve's current replicas: they are ours; forget losses and lives of those that no longer exist."""
        self.offered = frozenset(worker_ids)
        self.lost &= set(worker_ids)
        kept = {*worker_ids, *self.follower.workers}
        self._lives.keep_only(kept)
        self._speeds.keep_only(kept)
        self._views = {worker_id: view for worker_id, view in self._views.items() if worker_id in kept}

    def max_model_len(self) -> int | None:
        """The longest request every known replica of ours accepts; None while none is known."""
        return min((w.info.max_model_len for w in self._own_workers()), default=None)

    def replicas(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(
                info=w.info, epoch=w.epoch, load=w.load, indexed_chunks=self.index.chunk_count(w.info.worker_id)
            )
            for w in self._own_workers()
        ]

    def index_status(self) -> IndexStatus:
        """How the index's feed is, what it credits to whom, and every counter of routing by prefix."""
        now, workers = self.clock(), self.follower.workers
        return IndexStatus(
            router_id=self.router_id,
            state=self.follower.state,
            workers=tuple(
                WorkerIndexStatus(
                    worker_id=worker_id,
                    epoch=known.epoch,
                    chunks=self.index.chunk_count(worker_id),
                    affinity=self._has_affinity(known),
                    same_scheme=known.indexed,
                    load_age_s=known.load_age_s(now),
                )
                for worker_id, known in workers.items()
            ),
            metrics={
                **self.index.snapshot(),
                **follower_metrics(self.follower.counters),
                **self.speculative.snapshot(),
                **self.parity.snapshot(),
                **({} if self.reuse is None else self.reuse.settled().metrics()),
                "kvray_index_load_only_workers": sum(not self._has_affinity(known) for known in workers.values()),
            },
        )

    def ready(self) -> bool:
        return self.readiness().ready

    def readiness(self) -> Readiness:
        return judge(
            snapshot_in=self.follower.ready,
            index=self.follower.state,
            loads={worker_id: known.load for worker_id, known in self.follower.workers.items()},
            offered=self.offered,
            lost=self.lost,
            starts_replicas=self.starts_replicas,
        )

    def epoch_of(self, worker_id: WorkerId) -> Epoch:
        """Under which its bookings stand; NO_EPOCH when it was never known."""
        return self._lives.epoch(worker_id, self.follower.workers.get(worker_id))

    def _own_workers(self) -> list[KnownWorker]:
        """Without those of another Ray cluster on the same index, as there are in an incremental upgrade. Serve says
        which are ours with the first request; until then it is all."""
        workers, offered = self.follower.workers, self.offered
        return [known for worker_id, known in workers.items() if offered is None or worker_id in offered]

    def _has_affinity(self, known: KnownWorker) -> bool:
        """Whether what is said to be held there counts: the one place that decides it. Else it is chosen by load."""
        return known.indexed and known.in_step and self.follower.ready

    def _feed_late(self) -> bool:
        return self.follower.state is not FollowerState.FOLLOWING

    def _overlaps(self, hint: RouteHint) -> tuple[Mapping[WorkerId, int], Mapping[WorkerId, int]]:
        """Chunks by worker: held as its events say, and the larger of those and what it was sent."""
        confirmed, expected = self.index.overlaps(hint.chunk_hashes), self.speculative.overlaps(hint.chunk_hashes)
        if not expected:
            return confirmed, confirmed
        held = confirmed | {
            worker_id: chunks for worker_id, chunks in expected.items() if chunks > confirmed.get(worker_id, 0)
        }
        return confirmed, held

    def _candidates(
        self, worker_ids: Iterable[WorkerId], hint: RouteHint, held: Mapping[WorkerId, int], hot: int = 0
    ) -> list[Candidate]:
        views = [(worker_id, self._view(worker_id)) for worker_id in worker_ids]  # all, before any is judged by them
        now = self.clock()
        return [self._candidate(worker_id, view, hint, held.get(worker_id, 0), hot, now) for worker_id, view in views]

    def _candidate(
        self, worker_id: WorkerId, view: _View | None, hint: RouteHint, chunks: int, hot: int, now: float
    ) -> Candidate:
        lost = worker_id in self.lost or worker_id in hint.exclude
        if view is None:
            own = self.ledger.load(worker_id, self._lives.epoch(worker_id, None))
            work = self.work.look(worker_id, 0, now)
            return Candidate(worker_id, 0, own.tokens, 0.0, own.requests, lost, work, requests=own.requests)
        tokens, requests = self.ledger.load(worker_id, view.epoch)
        overlap = chunks * self.chunk_tokens if chunks and self._has_affinity(view.known) else 0
        if overlap >= hint.prompt_tokens:
            overlap = hint.prompt_tokens - 1  # one token is always computed
        speed, pace = self._speeds.of(worker_id, now), self.work.pace(worker_id, now)
        return Candidate(
            worker_id,
            overlap,
            tokens + view.others_tokens,
            speed.prefill_tokens_per_s / pace,
            requests if requests > view.busy else view.busy,
            lost or view.unready,
            self.work.look(worker_id, overlap, now),
            view.others_tokens,
            speed.step_time if pace == 1.0 or speed.step_time is None else speed.step_time.slowed(pace),
            view.waiting,
            view.kv_in_use,
            view.kv_free,
            requests,
            min(hot * self.chunk_tokens, hint.prompt_tokens - 1) if hot and self._has_affinity(view.known) else 0,
            view.kv_tokens,
        )

    def _hot_chunks(self, hint: RouteHint, held: Mapping[WorkerId, int]) -> int:
        """Of a prefix that one replica holds, nobody else holds half of, and many requests share; else 0."""
        first = second = 0
        for chunks in held.values():
            if chunks > first:
                first, second = chunks, first
            elif chunks > second:
                second = chunks
        if not first or second * 2 >= first:
            return 0
        return first if self.speculative.num_sharing(hint.chunk_hashes, first) >= _HOT_REQUESTS else 0

    def _view(self, worker_id: WorkerId) -> _View | None:
        """None while the index's feed does not know the worker."""
        known = self.follower.workers.get(worker_id)
        if known is None:
            return None
        view = self._views.get(worker_id)
        if view is None or view.known is not known:
            load, info = known.load, known.info
            if view is not None and view.known.load.step_time_model == load.step_time_model:
                step_time = view.step_time
            else:
                step_time = _step_time(load.step_time_model)
            self._speeds.tell(worker_id, load.prefill_tokens_per_s, step_time, self.clock())
            view = self._views[worker_id] = _View(
                known=known,
                epoch=self._lives.epoch(worker_id, known),
                step_time=step_time,
                others_tokens=load.total_uncached_tokens - load.uncached_tokens.get(self.router_id, 0),
                busy=load.running + load.waiting,
                waiting=load.waiting,
                kv_in_use=load.in_use_blocks / (load.total_blocks or 1),
                kv_free=load.free_blocks / (load.total_blocks or 1),
                kv_tokens=info.num_blocks * info.block_size,
                unready=load.paused or load.draining,
            )
            self.lost.discard(worker_id)  # it was dropped when it was lost: this is another life
        return view

    def _book(self, hint: RouteHint, score: Score, confirmed: Mapping[WorkerId, int]) -> None:
        candidate = score.candidate
        request_id, worker_id, overlap = hint.request_id, candidate.worker_id, candidate.overlap_tokens
        view, epoch = self._view(worker_id), self.epoch_of(worker_id)
        self.ledger.book(request_id, worker_id, epoch, hint.prompt_tokens - overlap)
        self.work.book(request_id, worker_id, score.own_s, hint.prompt_tokens, overlap, self.clock())
        if view is not None and view.known.indexed:
            self.speculative.routed(request_id, worker_id, epoch, hint.chunk_hashes)
        if overlap:
            self.parity.expect(
                Promise(
                    request_id=request_id,
                    worker_id=worker_id,
                    first_chunk=hint.chunk_hashes[0],
                    prompt_tokens=hint.prompt_tokens,
                    overlap_tokens=overlap,
                    confirmed=worker_id in confirmed,
                )
            )

    def _continued(self, worker_id: WorkerId, old: Epoch, new: Epoch) -> None:
        self.ledger.carry_over(worker_id, old, new)
        self.speculative.carry_over(worker_id, new)

    def _ended(self, worker_id: WorkerId) -> None:
        self.speculative.end_life(worker_id)
        self.work.end_life(worker_id)


def _step_time(coefficients: Sequence[float]) -> StepTimeModel | None:
    """None while a replica has none, and when what it says is not one."""
    try:
        return StepTimeModel.from_wire(list(coefficients))
    except ValueError:
        return None


_states: dict[str, RoutingState] = {}


def install(deployment: str, state: RoutingState) -> None:
    """Make `state` the one of this process for the named worker deployment."""
    _states[deployment] = state


def installed(deployment: str) -> RoutingState | None:
    return _states.get(deployment)
