"""ReplicaLives: a new epoch of the same process goes on, a new process begins."""

from __future__ import annotations

from fake_routing import E1, E2, A, B, RoutingWorld

from cluster.core.replica import Epoch, WorkerId
from cluster.index.base import NO_EPOCH
from router.replica_lives import ReplicaLives


class Lives:
    """The lives of what a RoutingWorld's follower knows, and what they said."""

    def __init__(self) -> None:
        self.said: list[tuple[WorkerId, Epoch, Epoch] | WorkerId] = []
        self.world = RoutingWorld()
        self.lives = ReplicaLives(lambda *continued: self.said.append(continued), self.said.append)

    def epoch(self, worker_id: WorkerId) -> Epoch:
        return self.lives.epoch(worker_id, self.world.follower.workers.get(worker_id))


def test_a_worker_that_becomes_known_takes_what_was_booked_before() -> None:
    lives = Lives()
    assert lives.epoch(A) == NO_EPOCH
    lives.world.join(A)
    assert [lives.epoch(A), lives.epoch(A)] == [E1, E1]
    assert lives.said == [(A, NO_EPOCH, E1)]


def test_the_same_incarnation_goes_on_under_its_new_epoch() -> None:
    lives = Lives()
    for epoch in (E1, E2):
        lives.world.join(A, epoch=epoch, incarnation="p")
        assert lives.epoch(A) == epoch
    assert lives.said == [(A, NO_EPOCH, E1), (A, E1, E2)]


def test_another_incarnation_or_an_unknown_one_is_another_process() -> None:
    for first, second in (("p", "q"), ("", ""), ("p", ""), ("", "p")):
        lives = Lives()
        lives.world.join(A, epoch=E1, incarnation=first)
        lives.epoch(A)
        lives.world.join(A, epoch=E2, incarnation=second)
        assert lives.epoch(A) == E2
        assert lives.said == [(A, NO_EPOCH, E1), A]


def test_a_silent_worker_keeps_its_epoch() -> None:
    lives = Lives()
    lives.world.join(A)
    lives.epoch(A)
    known = lives.world.follower.workers.pop(A)
    assert lives.epoch(A) == E1
    lives.world.follower.workers[A] = known
    assert lives.epoch(A) == E1
    assert lives.said == [(A, NO_EPOCH, E1)]


def test_a_dead_process_never_goes_on() -> None:
    lives = Lives()
    lives.world.join(A, incarnation="p")
    lives.epoch(A)
    lives.lives.lost(A)
    del lives.world.follower.workers[A]
    assert lives.epoch(A) == NO_EPOCH
    lives.world.join(A, epoch=E2, incarnation="q")
    lives.epoch(A)
    assert lives.said == [(A, NO_EPOCH, E1), A, (A, NO_EPOCH, E2)]


def test_lives_of_replicas_that_no_longer_exist_are_forgotten() -> None:
    lives = Lives()
    for worker_id in (A, B):
        lives.world.join(worker_id)
        lives.epoch(worker_id)
    lives.lives.keep_only([B])
    assert lives.said[2:] == [A]
    del lives.world.follower.workers[A]
    assert (lives.epoch(A), lives.epoch(B)) == (NO_EPOCH, E1)
