"""What a router can see of the index's feed: its state, its counters, and the workers it knows.

    cold          the workers known at the start have not all been read yet: route by load
    following     Redis answers, and nothing is late for longer than `stale_after_s`
    stale         Redis answers, but entries are applied later than that after their time in the stream, or a worker has
                  been out of step or behind its published seq for longer than that
    unreachable   the last call failed; index and loads stay as they were, and affinity goes on with them

Affinity is a matter of each worker: it is credited with chunks while `in_step`. A worker whose snapshot is still to be
read is not, nor is one behind for longer than `stale_after_s`; the others keep theirs. Entries that are applied later
than that are everybody's: then none is in step.

Owns: FollowerState, KnownWorker, FollowerCounters.
Does not: change them (cluster.index.follower).
Invariants: a KnownWorker is of exactly one life; its load is never older than its registration.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cluster.core.replica import Epoch, ReplicaInfo, ReplicaLoad


class FollowerState(StrEnum):
    COLD = "cold"
    FOLLOWING = "following"
    STALE = "stale"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownWorker:
    """A live worker. `indexed` is False when its route digest is another: then it is routed to by load only.

    `in_step`: what the index says of it may be credited (see above).
    """

    info: ReplicaInfo
    epoch: Epoch
    load: ReplicaLoad
    loaded_at: float
    indexed: bool
    in_step: bool = True

    def load_age_s(self, now: float) -> float:
        return now - self.loaded_at


@dataclass(slots=True)
class FollowerCounters:
    """applied: entries taken into the index.  skipped: entries that were old, repeated, unknown, or in the snapshot
    to come.  repaired: times that a worker fell out of step and was read again.  bad: payloads not understood.
    overflows: snapshot reads begun anew because too many entries came meanwhile.  lag_s: how long after its time in
    the stream, by the server's clock, the last entry was applied; 0 when there is nothing left to read."""

    applied: int = 0
    skipped: int = 0
    repaired: int = 0
    bad: int = 0
    scheme_mismatches: int = 0
    overflows: int = 0
    lag_s: float = 0.0
