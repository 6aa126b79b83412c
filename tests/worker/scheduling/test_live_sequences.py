"""LiveSequences: the table by id and the running list, for plain sequences and for groups with their rows."""

from __future__ import annotations

import pytest
from scheduling_world import SchedulingWorld

from worker.scheduling.live_sequences import LiveSequences
from worker.sequence import SequenceStatus


def live(world: SchedulingWorld) -> LiveSequences:
    return world.scheduler._live


def ids(world: SchedulingWorld) -> list[str]:
    return [seq.seq_id for seq in live(world).running]


def test_rows_run_in_the_place_of_their_leader() -> None:
    world = SchedulingWorld(64, token_budget=8)
    first = world.add([1, 2, 3], max_tokens=9)
    world.steps()
    group = world.add(list(range(100, 112)), max_tokens=5, n=2)
    world.steps()
    last = world.add([7, 8], max_tokens=9)
    assert ids(world) == [first, group]
    world.steps()
    assert ids(world) == [first, f"{group}/0", f"{group}/1", last]
    assert {seq.seq_id for seq in live(world)} == {first, group, last, f"{group}/0", f"{group}/1"}
    assert group in live(world) and live(world)[group].status is SequenceStatus.FORKED
    assert live(world).get("nobody") is None


def test_beams_that_come_and_go_keep_the_place() -> None:
    world = SchedulingWorld(64)
    first = world.add([1, 2, 3], max_tokens=12)
    beams = world.add([4, 5, 6], max_tokens=8, beam_width=3)
    last = world.add([7, 8], max_tokens=12)
    for _ in range(6):
        world.steps()
        assert (ids(world)[0], ids(world)[-1]) == (first, last)
        rows = set(ids(world)[1:-1])
        assert {seq.seq_id for seq in live(world)} - rows - {beams} == {first, last}


def test_a_row_that_ends_leaves_and_the_others_stay() -> None:
    world = SchedulingWorld(64)
    group = world.add([4, 5, 6], max_tokens=8, n=2)
    world.steps(2)
    row = live(world).running[0]
    live(world).end_row(row)
    assert ids(world) == [f"{group}/1"] and row.seq_id not in live(world) and group in live(world)


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"beam_width": 2}], ids=["plain", "samples", "beams"])
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_what_is_dropped_is_nowhere_and_holds_nothing(steps: int, options: dict[str, int]) -> None:
    world = SchedulingWorld(64, token_budget=8)
    other = world.add([7, 8], max_tokens=30)
    world.steps()
    request = world.add(list(range(100, 112)), max_tokens=9, **options)
    world.steps(steps)
    seq = live(world)[request]
    if not steps:
        world.queue.remove(seq)
    live(world).drop(seq)
    assert [one.seq_id for one in live(world)] == ids(world) == [other]
    assert list(world.fake.engine._manager._tables) == [other]
    assert seq.status is SequenceStatus.FINISHED
    world.fake.engine._manager.check_invariants()
