"""What a router can see of the index's feed: its state, its counters, and the workers it knows.

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
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownWorker:
    """A live worker. `indexed` is False when its route digest is another: then it is routed to by load only."""

    info: ReplicaInfo
    epoch: Epoch
    load: ReplicaLoad
    loaded_at: float
    indexed: bool

    def load_age_s(self, now: float) -> float:
        return now - self.loaded_at


@dataclass(slots=True)
class FollowerCounters:
    """Entries applied; entries skipped as old, repeated or unknown; snapshots re-read; payloads not understood."""

    applied: int = 0
    skipped: int = 0
    repaired: int = 0
    bad: int = 0
    scheme_mismatches: int = 0
