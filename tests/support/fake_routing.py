"""A RoutingState over a real index and ledger, with a follower that knows what the test tells it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash, RouteScheme, hash_prompt, root_hash
from cluster.core.replica import Epoch, ReplicaInfo, ReplicaLoad, WorkerId
from cluster.index.follower import IndexFollower
from cluster.index.known import KnownWorker
from cluster.index.memory import MemoryIndex
from router.route_ledger import RouteLedger
from router.routing_state import RouteHint, RoutingState
from router.scoring import Candidate, EstimatedTtft

CHUNK = 4  # tokens
A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
E1, E2 = Epoch(1), Epoch(2)


def chunks(count: int, salt: str = "") -> tuple[ChunkHash, ...]:
    """The first `count` chunk hashes of the one prompt that all tests share."""
    scheme = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=CHUNK, salt=salt)
    return tuple(hash_prompt(root_hash(scheme), range(count * CHUNK), CHUNK))


def hint(request_id: str = "r", tokens: int = 40, exclude: Sequence[WorkerId] = (), salt: str = "") -> RouteHint:
    return RouteHint(
        request_id=request_id,
        chunk_hashes=chunks(tokens // CHUNK, salt),
        prompt_tokens=tokens,
        exclude=frozenset(exclude),
    )


@dataclass
class FakeFollower:
    index: MemoryIndex
    ready: bool = True
    workers: dict[WorkerId, KnownWorker] = field(default_factory=dict)
    dropped: list[WorkerId] = field(default_factory=list)

    def drop(self, worker_id: WorkerId) -> None:
        self.dropped.append(worker_id)
        self.workers.pop(worker_id, None)
        self.index.drop_worker(worker_id)


class RoutingWorld:
    """`now` is the clock. Replicas join with `join`; candidates of the last decision are in `seen`."""

    def __init__(self) -> None:
        self.index = MemoryIndex()
        self.follower = FakeFollower(self.index)
        self.ledger = RouteLedger()
        self.now = 100.0
        self.state = RoutingState(
            router_id="me",
            index=self.index,
            follower=cast(IndexFollower, self.follower),
            ledger=self.ledger,
            policy=EstimatedTtft(default_rate=1000.0, near_tie=0.0, rng=random.Random(1)),
            chunk_tokens=CHUNK,
            clock=lambda: self.now,
        )

    def join(
        self, worker_id: WorkerId, held: int = 0, epoch: Epoch = E1, max_model_len: int = 4096, **load: Any
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
        )
        self.index.add_worker(worker_id, epoch)
        self.index.apply(worker_id, epoch, [CacheEvent(CacheEventKind.STORED, chunks(held))])
        self.follower.workers[worker_id] = KnownWorker(
            info=info, epoch=epoch, load=ReplicaLoad(**load), loaded_at=self.now, indexed=True
        )

    def decide(self, request: RouteHint, *worker_ids: WorkerId) -> list[WorkerId]:
        return self.state.decide(request, worker_ids)

    @property
    def seen(self) -> dict[WorkerId, Candidate]:
        return {score.candidate.worker_id: score.candidate for score in self.state.decisions[-1].ranking}
