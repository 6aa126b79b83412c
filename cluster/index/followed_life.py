"""FollowedLife: how far a router has followed one life of a worker.

    out of step (seq None) --begin_reading--> reading (live entries are held) --come_in--> behind or in step
           ^                                                                                      |
           +------------------------------- fall_out (a hole in seq) -----------------------------+

Entries received before a snapshot read began are in that snapshot, so only those received during it are held.

Owns: the place in the life's entries, and the entries held while its snapshot is read.
Does not: touch the index or read snapshots (cluster.index.snapshot_repair).
Invariants: held entries are bounded; an entry is taken once, in seq order, or the life is out of step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from cluster.core.replica import Epoch
from cluster.index.base import IndexEntry

MAX_HELD_RECORDS = 262_144  # chunks, and one more for each entry


class Taken(Enum):
    """What is to be done with an entry."""

    APPLY = auto()
    SKIP = auto()
    HELD = auto()
    GAP = auto()


@dataclass(slots=True, eq=False)
class FollowedLife:
    """`seq`: the last entry that the index contains, None when it is out of step. It may be credited from `settled`
    on. `promised`: what the worker had published as of the last poll. `due`: what must be here at the next check for
    lost entries. `late_since`: since when the life has been behind `late_for_seq`."""

    epoch: Epoch
    max_held_records: int = MAX_HELD_RECORDS
    seq: int | None = None
    settled: int = 0
    promised: int = 0
    due: int = 0
    late_for_seq: int = 0
    late_since: float | None = None
    tried: bool = False
    overflowed: bool = False
    _reading: bool = False
    _held: dict[int, IndexEntry] = field(default_factory=dict)
    _held_records: int = 0

    @property
    def in_step(self) -> bool:
        return self.seq is not None and self.seq >= self.settled

    @property
    def held_records(self) -> int:
        return self._held_records

    def note_time(self, now: float) -> None:
        """Keep `late_since` true. A worker that always has one entry under way is not late: each arrives in time."""
        if self._has(self.late_for_seq):
            self.late_since = None
        if self.late_since is None and not self._has(self.promised):
            self.late_since, self.late_for_seq = now, self.promised

    def late_for(self, now: float) -> float:
        return 0.0 if self.late_since is None else now - self.late_since

    def take(self, entry: IndexEntry) -> Taken:
        """Decide on a live entry of this epoch. After APPLY the entry counts as in the index."""
        if self.seq is None:
            return self._hold(entry) if self._reading else Taken.SKIP
        if entry.seq <= self.seq:
            return Taken.SKIP
        if entry.seq > self.seq + 1:
            return Taken.GAP
        self.seq = entry.seq
        return Taken.APPLY

    def fall_out(self) -> None:
        """What the index contains is not to be trusted any more."""
        self.seq = None
        self.stop_reading()

    def begin_reading(self) -> None:
        self.stop_reading()
        self._reading = True

    def stop_reading(self) -> None:
        self._reading = self.overflowed = False
        self._held.clear()
        self._held_records = 0

    def next_held(self, seq: int) -> IndexEntry | None:
        """Remove and return the held entry after `seq`."""
        entry = self._held.pop(seq + 1, None)
        if entry is not None:
            self._held_records -= entry.records
        return entry

    def come_in(self, seq: int, settled: int) -> bool:
        """The index contains everything up to `seq`. False when a held entry is out of reach: read again."""
        if not self._reading or self.overflowed or any(held > seq for held in self._held):
            return False
        self.stop_reading()
        self.seq, self.settled = seq, settled
        return True

    def _has(self, seq: int) -> bool:
        return self.in_step and self.seq is not None and self.seq >= seq

    def _hold(self, entry: IndexEntry) -> Taken:
        if self.overflowed or entry.seq in self._held:
            return Taken.SKIP
        self._held[entry.seq] = entry
        self._held_records += entry.records
        if self._held_records > self.max_held_records:
            self._held.clear()
            self._held_records = 0
            self.overflowed = True
        return Taken.HELD
