"""ReuseWatch: every answered request is counted once, and nothing is kept of what is over."""

from __future__ import annotations

import random

import pytest
from fake_routing import CHUNK, A, B, C, RoutingWorld, hashes_of, hint_of

from cluster.core.events import CacheEvent, CacheEventKind
from router.reuse_explanation import LossReason
from router.reuse_watch import LATE_S

WORKERS = (A, B, C)


class Course:
    """Requests and events in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = RoutingWorld()
        for worker_id in WORKERS:
            self.world.join(worker_id)
        self.families = [[self.rng.randrange(50) for _ in range(60)] for _ in range(4)]
        self.prompts: list[list[int]] = [self.families[0]]
        self.live: list[str] = []
        self.sent = self.answered = 0

    def step(self) -> None:
        self.world.now += self.rng.choice([0.0, 0.01, 0.3])
        action = self.rng.choice([self.send, self.send, self.answer, self.give_up, self.store, self.remove, self.clear])
        action()

    def send(self) -> None:
        rng, base = self.rng, self.rng.choice(self.families)
        self.prompts.append([*base[: rng.randrange(1, 61)], *(rng.randrange(50) for _ in range(rng.randrange(9)))])
        self.sent += 1
        hint = hint_of(f"r{self.sent}", self.prompts[-1], salt=rng.choice(["", "", "s"]))
        self.live.append(hint.request_id)
        chosen = self.world.decide(hint, *WORKERS)
        if rng.random() < 0.2:
            self.world.state.routed(hint, rng.choice(chosen))
        if rng.random() < 0.1:
            self.world.decide(hint, *WORKERS)

    def answer(self) -> None:
        if self.live:
            self.answered += 1
            self.world.state.answered(self.live[0], self.rng.randrange(0, 70))
            self.world.state.release(self.live.pop(0))

    def give_up(self) -> None:
        if self.live:
            self.world.state.release(self.live.pop(self.rng.randrange(len(self.live))))

    def store(self) -> None:
        self.world.store(self.rng.choice(WORKERS), *hashes_of(self.rng.choice(self.prompts)))

    def remove(self) -> None:
        self.world.remove(self.rng.choice(WORKERS), *hashes_of(self.rng.choice(self.prompts))[::-1])

    def clear(self) -> None:
        worker_id = self.rng.choice(WORKERS)
        epoch = self.world.follower.workers[worker_id].epoch
        self.world.index.apply(worker_id, epoch, [CacheEvent(CacheEventKind.CLEARED)])


@pytest.mark.parametrize("seed", range(10))
def test_any_course_of_requests_and_events_leaves_nothing_behind(seed: int) -> None:
    course = Course(seed)
    world, watch = course.world, course.world.reuse
    for _ in range(600):
        course.step()
    while course.live:
        course.give_up()
    world.now += LATE_S
    totals = world.state.misses()
    assert totals.requests == course.answered > 20
    lost = sum(total.tokens for total in totals.by_reason.values())
    assert 0 <= totals.prompt - totals.reused - lost <= course.answered * CHUNK
    assert totals.prompt >= totals.seen >= totals.held >= totals.chosen >= totals.reused
    assert len(watch) == 0
    assert not (watch._live or watch._answered or watch._awaiting or watch._by_worker)


def test_the_counters_are_among_the_routers_metrics() -> None:
    world = RoutingWorld()
    world.join(A)
    world.decide(hint_of("r", range(10)), A)
    world.state.answered("r", 0)
    assert world.state.index_status().metrics["kvray_reuse_requests"] == 0  # what is late may still show
    world.now += LATE_S
    metrics = world.state.index_status().metrics
    assert (metrics["kvray_reuse_requests"], metrics["kvray_reuse_tokens_prompt"]) == (1, 10)
    assert metrics["kvray_reuse_lost_tokens_never_seen"] == 10
    assert {name.rsplit("lost_requests_")[-1] for name in metrics if "lost_requests" in name} == set(LossReason)


def test_a_request_counts_once_however_often_it_is_answered() -> None:
    world = RoutingWorld()
    world.join(A)
    world.decide(hint_of("r", range(10)), A)
    assert world.state.answered("r", 4) == "prompt=10,seen=4,held=4,chosen=4,reused=4;never_seen=6@4"
    assert world.state.answered("r", 0) is None
    assert world.state.answered("unknown", 0) is None
    world.now += LATE_S
    assert world.state.misses().requests == 1


def test_examples_are_the_latest_and_few() -> None:
    world = RoutingWorld()
    world.join(A)
    for number in range(20):
        world.decide(hint_of(f"r{number}", range(100 * number, 100 * number + 10)), A)
        world.state.answered(f"r{number}", 0)
    world.now += LATE_S
    total = world.state.misses().by_reason[LossReason.NEVER_SEEN]
    assert total.requests == 20
    assert [example.request_id for example in total.examples] == [f"r{number}" for number in range(15, 20)]
