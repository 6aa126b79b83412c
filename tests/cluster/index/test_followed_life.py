"""FollowedLife: entries are taken once, in order, and held ones are bounded."""

from __future__ import annotations

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, WorkerId
from cluster.index.base import IndexEntry
from cluster.index.followed_life import FollowedLife, Taken

CHUNK = ChunkHash(bytes(16))


def entry(seq: int, chunks: int = 1) -> IndexEntry:
    return IndexEntry(WorkerId("a"), Epoch(1), seq, (CacheEvent(CacheEventKind.STORED, (CHUNK,) * chunks),))


def following(seq: int, settled: int = 0) -> FollowedLife:
    life = FollowedLife(Epoch(1))
    life.begin_reading()
    assert life.come_in(seq, settled)
    return life


def test_in_order_repeated_and_missing_entries() -> None:
    life = following(4)
    assert life.take(entry(5)) is Taken.APPLY
    assert life.take(entry(5)) is Taken.SKIP
    assert life.take(entry(4)) is Taken.SKIP
    assert life.take(entry(7)) is Taken.GAP
    assert life.seq == 5


def test_only_what_comes_while_the_snapshot_is_read_is_held() -> None:
    life = FollowedLife(Epoch(1))
    assert life.take(entry(1)) is Taken.SKIP  # the snapshot to come has it
    life.begin_reading()
    for seq in (9, 8, 9):
        life.take(entry(seq))
    assert life.held_records == 4
    assert life.next_held(6) is None
    assert [held.seq if (held := life.next_held(seq)) else None for seq in (7, 8, 9)] == [8, 9, None]
    assert life.held_records == 0
    assert life.come_in(9, 9)
    assert life.take(entry(10)) is Taken.APPLY


def test_a_held_entry_beyond_a_hole_means_reading_again() -> None:
    life = FollowedLife(Epoch(1))
    life.begin_reading()
    life.take(entry(9))
    assert life.come_in(7, 7) is False
    life.begin_reading()  # forgets it: whatever came before is in the next snapshot
    assert life.come_in(9, 9) is True


def test_held_entries_are_bounded() -> None:
    life = FollowedLife(Epoch(1), max_held_records=10)
    life.begin_reading()
    most = 0
    for seq in range(1, 100):
        life.take(entry(seq, chunks=2))
        most = max(most, life.held_records)
    assert most <= 10
    assert life.overflowed
    assert life.come_in(0, 0) is False
    life.begin_reading()
    assert not life.overflowed


def test_credited_only_from_settled_on() -> None:
    life = following(4, settled=6)
    assert not life.in_step
    life.take(entry(5))
    assert not life.in_step
    life.take(entry(6))
    assert life.in_step


def test_a_life_that_fell_out_while_it_was_read_does_not_come_in() -> None:
    life = FollowedLife(Epoch(1))
    life.begin_reading()
    life.fall_out()
    assert life.come_in(3, 3) is False
    assert not life.in_step


def test_how_long_it_is_late() -> None:
    life = following(4)
    life.note_time(10.0)
    assert life.late_for(20.0) == 0
    life.promised = 5
    life.note_time(20.0)
    life.note_time(21.0)
    assert life.late_for(22.5) == 2.5
    life.take(entry(5))
    life.note_time(23.0)
    assert life.late_for(24.0) == 0
