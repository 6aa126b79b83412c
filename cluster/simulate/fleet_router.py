"""FleetRouter: a router of the cluster in a simulation: its RoutingState over a feed that the simulation fills.

Owns: assembling the state for what a policy may know, heartbeats, and the delay of events.
Does not: choose (router.routing_state, the policies) or run replicas.
Invariants: index, speculation, ledger and policy are those of a live router; only Redis is not there: what a replica
published is applied `event_lag_s` later, and a heartbeat is taken when a decision needs one and the last is too old.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from cluster.core.events import CacheEvent
from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, ReplicaInfo, WorkerId
from cluster.index.follower import IndexFollower
from cluster.index.instrumented import InstrumentedIndex
from cluster.index.known import FollowerCounters, FollowerState, KnownWorker
from cluster.index.memory import MemoryIndex
from cluster.index.speculative import LINGER_S, MAX_CHUNKS, SpeculativeIndex
from cluster.simulate.mooncake_trace import TRACE_BLOCK
from cluster.simulate.policy_lineup import Knowledge, PolicyContext, PolicyEntry
from cluster.simulate.scaled_replica import SCHEME, ReplicaSettings, ScaledReplica
from cluster.simulate.virtual_clock import VirtualClock
from router.estimated_ttft import TtftParameters
from router.own_work import OwnWork
from router.parity_watch import ParityWatch
from router.route_hint import RouteHint
from router.route_ledger import RouteLedger
from router.routing_state import RoutingState

ROUTER_ID = "simulated"
_EPOCH = Epoch(1)


@dataclass(slots=True)
class _Feed:
    """What RoutingState reads of an IndexFollower."""

    index: InstrumentedIndex
    workers: dict[WorkerId, KnownWorker] = field(default_factory=dict)
    ready: bool = True
    state: FollowerState = FollowerState.FOLLOWING
    counters: FollowerCounters = field(default_factory=FollowerCounters)

    def drop(self, worker_id: WorkerId) -> None:
        self.workers.pop(worker_id, None)
        self.index.drop_worker(worker_id)


class FleetRouter:
    def __init__(
        self,
        entry: PolicyEntry,
        replicas: Mapping[WorkerId, ScaledReplica],
        settings: ReplicaSettings,
        clock: VirtualClock,
        seed: int,
        parameters: TtftParameters | None = None,
    ) -> None:
        self._entry = entry
        self._replicas: dict[WorkerId, ScaledReplica] = {}
        self._clock = clock
        self.hears_events = entry.knows in (Knowledge.EVENTS, Knowledge.EVENTS_ONLY)
        self._needs_hashes = entry.knows is not Knowledge.NOTHING
        parity = ParityWatch(clock)
        self._index = InstrumentedIndex(MemoryIndex(), settings.block, observer=parity)
        self._feed = _Feed(self._index)
        context = PolicyContext(
            rng=random.Random(seed),
            clock=clock,
            step_time=settings.step_time,
            token_budget=settings.token_budget,
            max_num_seqs=settings.max_num_seqs,
            parameters=parameters,
        )
        self.state = RoutingState(
            router_id=ROUTER_ID,
            index=self._index,
            follower=cast(IndexFollower, self._feed),
            ledger=RouteLedger(),
            policy=entry.make(context),
            chunk_tokens=settings.block,
            speculative=self._expected(settings.block),
            parity=parity,
            clock=clock,
            work=OwnWork(settings.ageing_s, settings.max_num_seqs),
        )
        for worker_id, replica in replicas.items():
            self.join(worker_id, replica)

    def join(self, worker_id: WorkerId, replica: ScaledReplica) -> None:
        """Another replica, with nothing in its cache."""
        settings = replica.settings
        info = ReplicaInfo(
            worker_id=worker_id,
            route_digest=SCHEME.digest,
            kv_fingerprint="",
            block_size=settings.block,
            chunk_tokens=settings.block,
            num_blocks=settings.kv_tokens // settings.block,
            max_model_len=settings.kv_tokens,
            model="virtual",
            incarnation=str(worker_id),
        )
        self._replicas[worker_id] = replica
        self._index.add_worker(worker_id, _EPOCH)
        self._feed.workers[worker_id] = KnownWorker(
            info=info, epoch=_EPOCH, load=replica.load(), loaded_at=self._clock.now, indexed=True
        )

    def leave(self, worker_id: WorkerId, others: Sequence[WorkerId]) -> None:
        """A replica has finished its work and is gone."""
        del self._replicas[worker_id]
        self._feed.drop(worker_id)
        self.state.keep_only(others)

    def choose(
        self, request_id: str, hashes: tuple[ChunkHash, ...], prompt_tokens: int, alive: Sequence[WorkerId]
    ) -> WorkerId:
        self._hear_loads()
        hint = RouteHint(
            request_id=request_id,
            chunk_hashes=hashes if self._needs_hashes else (),
            prompt_tokens=prompt_tokens,
        )
        return self.state.decide(hint, alive)[0]

    def hear(self, worker_id: WorkerId, events: Sequence[CacheEvent]) -> None:
        """What the replica published, when it arrives."""
        self._index.apply(worker_id, _EPOCH, events)

    def lose(self, worker_id: WorkerId) -> None:
        self.state.mark_lost(worker_id)

    def _hear_loads(self) -> None:
        oldest = self._clock.now - self._entry.load_age_s
        workers = self._feed.workers
        for worker_id, known in workers.items():
            if known.loaded_at <= oldest:
                load = self._replicas[worker_id].load()
                workers[worker_id] = KnownWorker(
                    info=known.info, epoch=known.epoch, load=load, loaded_at=self._clock.now, indexed=True
                )

    def _expected(self, block: int) -> SpeculativeIndex:
        match self._entry.knows:
            case Knowledge.EVENTS:
                return SpeculativeIndex(self._clock, linger_s=LINGER_S, max_chunks=MAX_CHUNKS)
            case Knowledge.HISTORY:
                most = self._entry.history_chunks * TRACE_BLOCK // block
                return SpeculativeIndex(self._clock, linger_s=math.inf, max_chunks=most)
            case _:
                return SpeculativeIndex(self._clock, max_chunks=0)
