"""Routers and workers in virtual time: real RoutingStates, workers that prefill one prompt after the other.

A worker takes requests in order while it has a seat, reuses what it holds, and prefills the rest at its rate. What it
stored reaches the routers `lag_s` later, its load with every heartbeat. Nothing here sleeps.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fake_routing import CHUNK, RoutingWorld, hint_of

from cluster.config import RouterConfig
from cluster.core.hashing import ChunkHash
from cluster.core.replica import WorkerId
from router.estimated_ttft import TtftParameters
from router.policies import create_policy
from router.routing_state import RouteHint


@dataclass(eq=False)
class Job:
    request_id: str
    router: RoutingWorld
    hint: RouteHint
    worker: FleetWorker
    decode_s: float
    uncached: int = 0
    cached: int | None = None
    answered: bool = False
    over: bool = False
    sent_at: float = 0.0
    waited_s: float = 0.0  # until its first token


@dataclass(eq=False)
class FleetWorker:
    worker_id: WorkerId
    queue: deque[Job] = field(default_factory=deque)
    running: Job | None = None
    held: set[ChunkHash] = field(default_factory=set)
    decoding: int = 0
    prefilled_tokens: int = 0

    def outstanding(self) -> dict[str, int]:
        """Uncached tokens by router, as a heartbeat tells them."""
        tokens: Counter[str] = Counter()
        for job in [*self.queue, *([self.running] if self.running else [])]:
            tokens[job.router.state.router_id] += job.uncached if job is self.running else self.uncached(job)
        return dict(tokens)

    def uncached(self, job: Job) -> int:
        held = next((n for n, chunk in enumerate(job.hint.chunk_hashes) if chunk not in self.held), None)
        chunks = len(job.hint.chunk_hashes) if held is None else held
        return max(job.hint.prompt_tokens - chunks * CHUNK, 1)


class RoutingFleet:
    """`at` schedules anything; `send` routes a prompt at once; `run` plays until nothing is left to do."""

    def __init__(
        self,
        *,
        workers: int,
        routers: int = 1,
        rate: float = 4096.0,
        lag_s: float | None = 0.05,
        beat_s: float = 0.5,
        seed: int = 1,
        seats: int = 64,
    ) -> None:
        self.now = 0.0
        self.seats = seats
        self.rate, self.lag_s, self.beat_s = rate, lag_s, beat_s
        self.workers = {WorkerId(f"w{n}"): FleetWorker(WorkerId(f"w{n}")) for n in range(workers)}
        config = RouterConfig()
        self.routers = [
            RoutingWorld(
                f"router-{n}",
                create_policy(
                    config.policy,
                    default_rate=rate,
                    near_tie=config.near_tie,
                    rng=random.Random(seed * 100 + n),
                    parameters=TtftParameters(max_num_seqs=seats),
                ),
                lambda: self.now,
                seats=seats,
            )
            for n in range(routers)
        ]
        for router in self.routers:
            for worker_id in self.workers:
                router.join(worker_id, prefill_tokens_per_s=rate)
        self.jobs: list[Job] = []
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()

    def at(self, time_s: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._events, (time_s, next(self._number), action))

    def run(self, until: float = float("inf")) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def send(self, request_id: str, tokens: Sequence[int], router: int = 0, decode_s: float = 0.2) -> Job:
        """Route a prompt now and put it into the queue of the worker that was chosen."""
        world = self.routers[router]
        hint = hint_of(request_id, tokens)
        worker = self.workers[world.decide(hint, *self.workers)[0]]
        job = Job(request_id, world, hint, worker, decode_s, sent_at=self.now)
        self.jobs.append(job)
        worker.queue.append(job)
        self._start(worker)
        return job

    def cancel(self, job: Job) -> None:
        """The client leaves, while the request waits."""
        if job in job.worker.queue:
            job.worker.queue.remove(job)
            self._end(job)

    def beat(self) -> None:
        for worker in self.workers.values():
            busy = len(worker.queue) + (worker.running is not None)
            for router in self.routers:
                router.beat(
                    worker.worker_id,
                    uncached_tokens=worker.outstanding(),
                    waiting=busy,
                    running=worker.decoding,
                    prefill_tokens_per_s=self.rate,
                )

    def beat_until(self, end: float) -> None:
        for number in range(1, int(end / self.beat_s) + 1):
            self.at(number * self.beat_s, self.beat)

    def _start(self, worker: FleetWorker) -> None:
        if worker.running is None and worker.queue and worker.decoding < self.seats:
            job = worker.running = worker.queue.popleft()
            job.uncached = worker.uncached(job)
            job.cached = job.hint.prompt_tokens - job.uncached
            self.at(self.now + job.uncached / self.rate, lambda: self._prefilled(job))

    def _prefilled(self, job: Job) -> None:
        worker, new = job.worker, [chunk for chunk in job.hint.chunk_hashes if chunk not in job.worker.held]
        worker.held.update(new)
        worker.prefilled_tokens += job.uncached
        worker.running = None
        worker.decoding += 1
        job.answered = True
        job.waited_s = self.now - job.sent_at
        job.router.state.answered(job.request_id, job.cached)
        if new and self.lag_s is not None:
            self.at(self.now + self.lag_s, lambda: self._published(worker.worker_id, new))
        self.at(self.now + job.decode_s, lambda: self._decoded(job))
        self._start(worker)

    def _published(self, worker_id: WorkerId, chunks: list[ChunkHash]) -> None:
        for router in self.routers:
            router.store(worker_id, *chunks)

    def _decoded(self, job: Job) -> None:
        job.worker.decoding -= 1
        self._end(job)
        self._start(job.worker)

    def _end(self, job: Job) -> None:
        job.over = True
        job.router.state.release(job.request_id)
