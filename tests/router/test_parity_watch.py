"""ParityWatch: a routed overlap that the engine does not reuse is told apart from one that was evicted in between."""

from __future__ import annotations

import logging

import pytest
from fake_routing import A, B, chunks

from cluster.core.replica import WorkerId
from router.parity_watch import WAIT_S, ParityCounters, ParityWatch, Promise

FIRST, SECOND = chunks(2)


class World:
    def __init__(self) -> None:
        self.now = 10.0
        self.watch = ParityWatch(lambda: self.now)

    def expect(self, request_id: str, worker_id: WorkerId = A, confirmed: bool = True, overlap: int = 48) -> None:
        self.watch.expect(
            Promise(
                request_id=request_id,
                worker_id=worker_id,
                first_chunk=FIRST,
                prompt_tokens=60,
                overlap_tokens=overlap,
                confirmed=confirmed,
            )
        )

    def counters(self) -> ParityCounters:
        """After all verdicts."""
        self.now += WAIT_S
        metrics = self.watch.snapshot()
        return ParityCounters(**{name.removeprefix("kvray_parity_"): int(value) for name, value in metrics.items()})


def test_reuse_is_as_it_should_be() -> None:
    world = World()
    world.expect("r")
    world.watch.answered("r", 48)
    world.watch.answered("r", 0)  # only the first answer counts
    world.watch.answered("unknown", 0)
    assert world.counters() == ParityCounters(checks=1)


def test_nothing_reused_of_what_the_worker_still_holds_is_a_parity_miss() -> None:
    world = World()
    world.expect("r")
    world.watch.answered("r", 0)
    world.watch.forget("r")
    world.watch.lost(A, [SECOND])  # of which the beginning is still there
    world.watch.lost(B, None)
    assert world.watch.snapshot()["kvray_parity_misses"] == 0  # its events may still come
    assert world.counters() == ParityCounters(checks=1, misses=1)
    assert world.counters() == ParityCounters(checks=1, misses=1)


@pytest.mark.parametrize("everything", [True, False])
def test_a_loss_before_the_answer_is_an_eviction_and_after_it_a_late_index(everything: bool) -> None:
    """Also when the request itself has brought the chunk back meanwhile."""
    world = World()
    lost = None if everything else [SECOND, FIRST]
    world.expect("evicted")
    world.expect("elsewhere", B)
    world.watch.lost(A, lost)
    world.expect("late")
    world.watch.answered("evicted", 0)
    world.watch.answered("late", 0)
    world.watch.answered("elsewhere", 0)
    world.watch.forget("late")
    world.now += WAIT_S - 0.1
    world.watch.lost(A, lost)
    world.watch.lost(A, lost)
    assert world.counters() == ParityCounters(checks=3, evicted=1, index_late=1, misses=1)


def test_a_loss_that_comes_after_the_verdict_changes_nothing() -> None:
    world = World()
    world.expect("r")
    world.watch.answered("r", 0)
    world.now += WAIT_S
    world.watch.lost(A, None)
    assert world.counters() == ParityCounters(checks=1, misses=1)


def test_what_was_only_expected_is_counted_apart() -> None:
    """The request that was to bring it may have been cancelled."""
    world = World()
    world.expect("r", confirmed=False)
    world.watch.answered("r", 0)
    assert world.counters() == ParityCounters(checks=1, unfulfilled=1)


def test_requests_that_end_unanswered_or_go_elsewhere_leave_nothing() -> None:
    world = World()
    world.expect("cancelled")
    world.watch.forget("cancelled")
    world.watch.answered("cancelled", 0)
    world.expect("silent")
    world.watch.answered("silent", None)
    world.watch.answered("silent", 0)
    world.expect("moved")
    world.expect("moved", B)
    world.watch.lost(A, None)
    world.watch.answered("moved", 0)
    assert world.counters() == ParityCounters(checks=1, misses=1)
    assert len(world.watch) == 0


def test_one_warning_a_minute_with_counts_only(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    with caplog.at_level(logging.WARNING, logger="router.parity_watch"):
        for number in range(5):
            world.expect(f"r{number}", overlap=40 + number)
            world.watch.answered(f"r{number}", 0)
        world.counters()
        assert [record.getMessage() for record in caplog.records] == [
            "parity miss: a request of 60 tokens was routed to a for the 44 it holds, and the engine reused none "
            "(5 such since the last warning)"
        ]
        for number in range(5, 8):
            world.expect(f"r{number}")
            world.watch.answered(f"r{number}", 0)
        world.counters()
        assert len(caplog.records) == 1
        world.now += 60
        world.counters()
        assert "(3 such" in caplog.records[1].getMessage()
        world.now += 600
        world.counters()
        assert len(caplog.records) == 2
