"""Whole runs of routers and workers in virtual time: who gets what, and that every router counts every load once."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

from fake_routing import CHUNK, A, B, C, RoutingWorld, chunks, hint
from routing_fleet import Job, RoutingFleet

from cluster.config import RouterConfig
from cluster.core.replica import WorkerId
from cluster.index.speculative import LINGER_S
from router.policies import create_policy
from router.route_ledger import NO_LOAD

PREFIX = 4096
RATE = 4096.0


def prompt(number: int, tail: int, prefix: int = PREFIX) -> list[int]:
    """A shared beginning and a tail that nobody else has."""
    start = 100_000 + 10_000 * number
    return [*range(prefix), *range(start, start + tail)]


def send_into(jobs: dict[int, Job], fleet: RoutingFleet, number: int, tail: int) -> None:
    jobs[number] = fleet.send(f"{number}-{tail}", prompt(number, tail))


def test_a_shared_prefix_does_not_make_one_worker_a_monopoly() -> None:
    """200 requests with the same 4k prefix on 2 workers: both serve, and a tail stays where it was."""
    for per_second in (4, 20):
        fleet = RoutingFleet(workers=2, rate=RATE)
        first: dict[int, Job] = {}
        second: dict[int, Job] = {}
        for number in range(100):
            fleet.at(number / per_second, partial(send_into, first, fleet, number, 256))
            fleet.at((100 + number) / per_second, partial(send_into, second, fleet, number, 512))
        fleet.beat_until(200 / per_second + 5)
        fleet.run()
        shares = Counter(job.worker.worker_id for job in fleet.jobs)
        assert (sum(shares.values()), len(shares)) == (200, 2)
        assert max(shares.values()) <= 1.5 * min(shares.values())
        assert sum(second[n].worker is first[n].worker for n in second) >= 90
        # Each worker computed the prefix once, and each tail was computed once.
        assert sum(worker.prefilled_tokens for worker in fleet.workers.values()) <= 2 * PREFIX + 200 * 256 + 10 * 256


def test_among_the_least_busy_workers_the_longest_prefix_still_wins() -> None:
    """A fleet out of balance turns away from the busy holder, not from prefixes."""
    config = RouterConfig()
    policy = create_policy(config.policy, default_rate=1000.0, near_tie=config.near_tie, rng=random.Random(3))
    world = RoutingWorld(policy=policy)
    for worker_id, held, ahead in ((A, 10, 50_000), (B, 0, 100), (C, 5, 101), (WorkerId("d"), 9, 103)):
        world.join(worker_id, held=held, uncached_tokens={"other": ahead})
    for number in range(20):
        ranking = world.decide(hint(f"r{number}"), *world.follower.workers)
        assert ranking[0] == "d"
        assert ranking[-1] == A
        world.state.release(f"r{number}")


def test_a_burst_with_one_new_prefix_is_prefilled_on_two_workers_at_most() -> None:
    """16 at once on 4 workers, while the first event needs 200 ms: only what was routed can tell."""
    for tail in (0, 8, 16, 64):
        fleet = RoutingFleet(workers=4, rate=RATE, lag_s=0.2)
        for number in range(16):
            fleet.at(0.0, partial(fleet.send, f"r{number}", prompt(number, tail)))
        fleet.beat_until(4)
        fleet.run()
        assert sum(worker.prefilled_tokens >= PREFIX for worker in fleet.workers.values()) <= 2
        assert all(job.over for job in fleet.jobs)
        metrics = fleet.routers[0].state.index_status().metrics
        assert metrics["kvray_parity_misses"] == metrics["kvray_parity_unfulfilled"] == 0
        assert metrics["kvray_parity_checks"] >= 14  # all but who came first to a worker


def test_a_prefix_is_left_where_its_holder_has_no_seat_for_longer_than_the_prefix_takes() -> None:
    """4 seats each and answers of 8 s: the holder would be full for good, and its neighbour without work."""
    fleet = RoutingFleet(workers=2, rate=RATE, seats=4)
    for number in range(40):
        fleet.at(1.2 * number, partial(fleet.send, f"{number}", prompt(number, 8), decode_s=8.0))
    fleet.beat_until(80)
    fleet.run()
    shares = Counter(job.worker.worker_id for job in fleet.jobs)
    assert min(shares.values()) >= 15, shares
    waited = [job.waited_s for job in fleet.jobs[6:]]  # at first nobody knows how long answers are
    assert max(waited) <= 3.0
    assert sum(seconds > 0.1 for seconds in waited) <= 6, "7 of 8 seats are busy on average: nearly all find one"


def test_a_prefix_that_is_never_confirmed_stops_to_attract() -> None:
    fleet = RoutingFleet(workers=4, rate=RATE, lag_s=None)  # no event ever comes
    job = fleet.send("r", prompt(1, 0))
    fleet.run()
    prefilled_at = PREFIX / RATE
    for now, overlap in ((prefilled_at + LINGER_S - 0.01, PREFIX - 1), (prefilled_at + LINGER_S, 0)):
        fleet.now = now
        world = fleet.routers[0]
        world.decide(job.hint, *fleet.workers)
        assert world.seen[job.worker.worker_id].overlap_tokens == overlap
        world.state.release("r")
    assert fleet.routers[0].state.index_status().metrics["kvray_index_speculative_entries"] == 0


def test_load_is_counted_when_it_is_routed_not_when_it_answers() -> None:
    """Long prompts with short answers, all before any heartbeat: nobody gets them all."""
    fleet = RoutingFleet(workers=4, rate=RATE)
    for number in range(32):
        fleet.send(f"r{number}", prompt(number, 512, prefix=0))
    assert Counter(job.worker.worker_id for job in fleet.jobs) == dict.fromkeys(fleet.workers, 8)


class Bookkeeper:
    """Compares what each router sees with a recount from the jobs and from the last heartbeats."""

    def __init__(self, fleet: RoutingFleet) -> None:
        self.fleet = fleet
        self.beaten: dict[WorkerId, dict[str, int]] = {worker_id: {} for worker_id in fleet.workers}
        self.fresh = self.stale = self.busy = 0

    def ahead(self, router: RoutingWorld) -> dict[WorkerId, int]:
        """What a router sees before a request, without leaving a trace."""
        router.decide(hint("probe", tokens=CHUNK - 1), *self.fleet.workers)
        router.state.release("probe")
        return {worker_id: candidate.ahead_tokens for worker_id, candidate in router.seen.items()}

    def own(self, router: RoutingWorld, worker_id: WorkerId) -> int:
        jobs = [job for job in self.fleet.jobs if job.router is router and job.worker.worker_id == worker_id]
        return sum(job.hint.prompt_tokens for job in jobs if not job.answered and not job.over)

    def check(self) -> None:
        """Between two heartbeats: all of its own, and the others' as of the last one."""
        self.stale += 1
        for router in self.fleet.routers:
            for worker_id, tokens in self.ahead(router).items():
                beaten = self.beaten[worker_id].items()
                others = sum(tokens for name, tokens in beaten if name != router.state.router_id)
                assert tokens == self.own(router, worker_id) + others
                self.busy += tokens > 0

    def beat(self) -> None:
        """Right after a heartbeat: all there is."""
        self.fresh += 1
        self.fleet.beat()
        self.beaten = {worker_id: worker.outstanding() for worker_id, worker in self.fleet.workers.items()}
        truth = {worker_id: sum(tokens.values()) for worker_id, tokens in self.beaten.items()}
        for router in self.fleet.routers:
            assert self.ahead(router) == truth

    def cancel(self, request_id: str) -> None:
        for job in self.fleet.jobs:
            if job.request_id == request_id:
                self.fleet.cancel(job)


def test_three_routers_count_every_load_once_and_lose_none() -> None:
    """On 4 workers, also while a heartbeat is older than a booking, a first token or a cancellation."""
    fleet = RoutingFleet(workers=4, routers=3, rate=2000.0)
    books, rng = Bookkeeper(fleet), random.Random(5)
    for number in range(300):
        request_id, send_at = f"r{number}", rng.uniform(0, 20)
        tokens = prompt(number, rng.randrange(5, 900), prefix=0)
        fleet.at(send_at, partial(fleet.send, request_id, tokens, router=number % 3))
        if number % 7 == 0:
            fleet.at(send_at + 0.05, partial(books.cancel, request_id))
        fleet.at(send_at + 0.1, books.check)
    for tick in range(1, 100):
        fleet.at(tick * 0.5, books.beat)
    fleet.run()
    assert all(job.over for job in fleet.jobs)
    assert (books.fresh, books.stale) == (99, 300)
    assert books.busy > 1000
    for router in fleet.routers:
        assert len(router.ledger) == 0
        assert books.ahead(router) == dict.fromkeys(fleet.workers, 0)
        assert all(router.ledger.load(w, router.state.epoch_of(w)) == NO_LOAD for w in fleet.workers)


def test_two_applications_in_one_process_never_mix() -> None:
    """Each deployment has its state; what one hears of the other's replicas is ignored."""
    mine, other = RoutingWorld("mine"), RoutingWorld("other")
    mine.join(A, held=10)
    other.join(B, held=10)
    assert mine.decide(hint("r"), A) == [A]
    assert other.decide(hint("r"), B) == [B]
    assert (mine.ledger.requests(B, mine.state.epoch_of(B)), len(mine.ledger), len(other.ledger)) == (0, 1, 1)
    assert mine.speculative.overlaps(chunks(10)) == {A: 10}
    other.index.apply(A, other.state.epoch_of(A), [])
    other.state.routed(hint("unknown"), A)
    other.state.answered("unknown", 0)
    other.state.mark_lost(A)
    other.state.keep_only([B])
    assert other.decide(hint("r2"), B) == [B]
    assert mine.decide(hint("r2"), A) == [A]
    assert mine.seen[A].overlap_tokens == other.seen[B].overlap_tokens == 39
    assert (mine.state.lost, mine.follower.dropped) == (set(), [])
