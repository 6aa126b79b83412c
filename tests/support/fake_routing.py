"""A RoutingState over a real index and ledger, with a follower that knows what the test tells it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash, RouteScheme, hash_prompt, pack_tokens, root_hash
from cluster.core.replica import Epoch, ReplicaInfo, ReplicaLoad, WorkerId
from cluster.index.follower import IndexFollower
from cluster.index.instrumented import InstrumentedIndex
from cluster.index.known import FollowerCounters, FollowerState, KnownWorker
from cluster.index.memory import MemoryIndex
from cluster.index.speculative import SpeculativeIndex
from router.estimated_ttft import EstimatedTtft
from router.own_work import SEATS, OwnWork
from router.parity_watch import ParityWatch
from router.reuse_watch import ReuseWatch
from router.route_hint import PromptTrail
from router.route_ledger import RouteLedger
from router.routing_state import RouteHint, RoutingState
from router.scoring import Candidate, Policy

CHUNK = 4  # tokens
A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
E1, E2 = Epoch(1), Epoch(2)


def hashes_of(tokens: Sequence[int], salt: str = "") -> tuple[ChunkHash, ...]:
    return tuple(hash_prompt(root_hash(_scheme(salt)), tokens, CHUNK))


def _scheme(salt: str) -> RouteScheme:
    return RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=CHUNK, salt=salt)


def hint_of(
    request_id: str,
    tokens: Sequence[int],
    *,
    salt: str = "",
    message_ends: tuple[int, ...] = (),
    client_id: str = "",
    exclude: Sequence[WorkerId] = (),
) -> RouteHint:
    """As the front door makes it: with all it takes to explain the request."""
    hashes, plain = hashes_of(tokens, salt), hashes_of(tokens)
    return RouteHint(
        request_id=request_id,
        chunk_hashes=hashes,
        prompt_tokens=len(tokens),
        exclude=frozenset(exclude),
        client_id=client_id,
        trail=PromptTrail(
            root=root_hash(_scheme(salt)),
            tokens=pack_tokens(tokens),
            plain_root=root_hash(_scheme("")),
            plain_hashes=plain,
            message_ends=message_ends,
        ),
    )


def chunks(count: int, salt: str = "") -> tuple[ChunkHash, ...]:
    """The first `count` chunk hashes of the one prompt that all tests share."""
    return hashes_of(range(count * CHUNK), salt)


def hint(request_id: str = "r", tokens: int = 40, exclude: Sequence[WorkerId] = (), salt: str = "") -> RouteHint:
    return RouteHint(
        request_id=request_id,
        chunk_hashes=chunks(tokens // CHUNK, salt),
        prompt_tokens=tokens,
        exclude=frozenset(exclude),
    )


@dataclass
class FakeFollower:
    index: InstrumentedIndex
    ready: bool = True
    state: FollowerState = FollowerState.FOLLOWING
    counters: FollowerCounters = field(default_factory=FollowerCounters)
    workers: dict[WorkerId, KnownWorker] = field(default_factory=dict)
    dropped: list[WorkerId] = field(default_factory=list)

    def drop(self, worker_id: WorkerId) -> None:
        self.dropped.append(worker_id)
        self.workers.pop(worker_id, None)
        self.index.drop_worker(worker_id)


class RoutingWorld:
    """`now` is the clock. Replicas join with `join`; candidates of the last decision are in `seen`."""

    def __init__(
        self,
        router_id: str = "me",
        policy: Policy | None = None,
        clock: Callable[[], float] | None = None,
        seats: int = SEATS,
    ) -> None:
        self.now = 100.0
        clock = clock or (lambda: self.now)
        self.parity = ParityWatch(clock)
        self.reuse = ReuseWatch(clock, CHUNK)
        self.index = InstrumentedIndex(MemoryIndex(), CHUNK, observer=self.parity, reuse=self.reuse)
        self.speculative = SpeculativeIndex(clock)
        self.follower = FakeFollower(self.index)
        self.ledger = RouteLedger()
        self.state = RoutingState(
            router_id=router_id,
            index=self.index,
            follower=cast(IndexFollower, self.follower),
            ledger=self.ledger,
            policy=policy or EstimatedTtft(default_rate=1000.0, near_tie=0.0, rng=random.Random(1)),
            chunk_tokens=CHUNK,
            speculative=self.speculative,
            parity=self.parity,
            reuse=self.reuse,
            clock=clock,
            work=OwnWork(seats=seats),
        )

    def join(
        self,
        worker_id: WorkerId,
        held: int = 0,
        epoch: Epoch = E1,
        max_model_len: int = 4096,
        incarnation: str = "",
        **load: Any,
    ) -> None:
        """A replica that holds the first `held` chunks of the shared prompt. `load` is its heartbeat."""
        info = ReplicaInfo(
            worker_id=worker_id,
            route_digest="d",
            kv_fingerprint="f",
            block_size=CHUNK,
            chunk_tokens=CHUNK,
            num_blocks=64,
            max_model_len=max_model_len,
            model="demo",
            incarnation=incarnation,
        )
        self.index.add_worker(worker_id, epoch)
        self.index.apply(worker_id, epoch, [CacheEvent(CacheEventKind.STORED, chunks(held))])
        self.follower.workers[worker_id] = KnownWorker(
            info=info, epoch=epoch, load=ReplicaLoad(**load), loaded_at=self.now, indexed=True
        )

    def beat(self, worker_id: WorkerId, **load: Any) -> None:
        """Its next heartbeat."""
        known = self.follower.workers[worker_id]
        self.follower.workers[worker_id] = replace(known, load=ReplicaLoad(**load), loaded_at=self.now)

    def store(self, worker_id: WorkerId, *hashes: ChunkHash) -> None:
        self._apply(worker_id, CacheEventKind.STORED, hashes)

    def remove(self, worker_id: WorkerId, *hashes: ChunkHash) -> None:
        self._apply(worker_id, CacheEventKind.REMOVED, hashes)

    def _apply(self, worker_id: WorkerId, kind: CacheEventKind, hashes: tuple[ChunkHash, ...]) -> None:
        self.index.apply(worker_id, self.follower.workers[worker_id].epoch, [CacheEvent(kind, hashes)])

    def decide(self, request: RouteHint, *worker_ids: WorkerId) -> list[WorkerId]:
        return self.state.decide(request, worker_ids)

    @property
    def seen(self) -> dict[WorkerId, Candidate]:
        return {score.candidate.worker_id: score.candidate for score in self.state.decisions[-1].ranking}
