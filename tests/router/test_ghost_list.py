"""GhostList: evicted chunks are remembered, the oldest are forgotten first."""

from __future__ import annotations

from fake_routing import A, B, chunks

from cluster.core.replica import WorkerId
from router.ghost_list import GhostList

HASHES = chunks(12)


class World:
    def __init__(self, limit: int = 100) -> None:
        self.now = 10.0
        self.ghosts = GhostList(lambda: self.now, max_chunks=limit)


def test_a_run_of_evicted_chunks() -> None:
    world = World()
    world.ghosts.lost(A, [HASHES[4], HASHES[3]])
    world.ghosts.lost(B, [HASHES[2]])
    assert [world.ghosts.leading_run(HASHES, start) for start in (0, 2, 3, 4, 5, 12)] == [0, 5, 5, 5, 5, 12]


def test_the_oldest_go_first_and_a_loss_counts_anew() -> None:
    world = World(limit=3)
    for chunk in (HASHES[0], HASHES[1], HASHES[0], HASHES[2], HASHES[3]):
        world.ghosts.lost(A, [chunk])
    assert len(world.ghosts) == 3
    assert (world.ghosts.leading_run(HASHES, 0), world.ghosts.leading_run(HASHES, 2)) == (1, 4)


def test_since_when_something_is_lost() -> None:
    world = World()
    world.ghosts.lost(A, [HASHES[0]])
    world.now = 20.0
    world.ghosts.lost(B, None)
    ghosts = world.ghosts
    assert ghosts.lost_since(A, HASHES[0], 10.0) and not ghosts.lost_since(A, HASHES[0], 10.1)
    assert ghosts.lost_since(B, HASHES[5], 20.0) and not ghosts.lost_since(B, None, 20.1)
    assert not ghosts.lost_since(A, None, 0.0)


def test_workers_that_come_and_go_do_not_add_up() -> None:
    world = World()
    for number in range(5000):
        world.ghosts.lost(WorkerId(f"w{number}"), None)
    assert not world.ghosts.lost_since(WorkerId("w0"), None, 0.0)
    assert world.ghosts.lost_since(WorkerId("w4999"), None, 0.0)
