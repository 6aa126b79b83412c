"""ReplicaLives: under which epoch a worker's bookings stand, and whether a new epoch is a new process.

A worker registers again when Redis has forgotten it, and gets a new epoch although it runs on; it also gets one when
it was started again under the same name. `ReplicaInfo.incarnation`, drawn once per process, tells the two apart:

    known as             seen before              the bookings
    epoch e              never                    of the time before it was known go to e
    epoch f              e, same incarnation      of e go to f: the requests still run there
    epoch f              e, another incarnation   of e end with e: their calls broke
    not known            e                        stay on e: it may only be silent

Owns: the last life seen of each worker, and saying once that it went on or ended.
Does not: hold bookings (route_ledger), or learn of workers (the follower does).
Invariants: without an incarnation to compare, a new epoch is a new process; a process that was reported dead never
goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from cluster.core.replica import Epoch, WorkerId
from cluster.index.base import NO_EPOCH
from cluster.index.known import KnownWorker


class _Seen(NamedTuple):
    epoch: Epoch
    incarnation: str


class ReplicaLives:
    """`on_continued(worker, old epoch, new epoch)` and `on_ended(worker)` are called when `epoch` first notices."""

    def __init__(
        self,
        on_continued: Callable[[WorkerId, Epoch, Epoch], None],
        on_ended: Callable[[WorkerId], None],
    ) -> None:
        self._on_continued = on_continued
        self._on_ended = on_ended
        self._seen: dict[WorkerId, _Seen] = {}

    def epoch(self, worker_id: WorkerId, known: KnownWorker | None) -> Epoch:
        """The epoch to book under; `known` is what the index's feed says of the worker now."""
        seen = self._seen.get(worker_id)
        if known is None:
            return NO_EPOCH if seen is None else seen.epoch
        if seen is None or seen.epoch != known.epoch:
            self._advance(worker_id, seen, known)
        return known.epoch

    def lost(self, worker_id: WorkerId) -> None:
        """Its process died. Whatever comes under this name is another one."""
        self._seen.pop(worker_id, None)
        self._on_ended(worker_id)

    def keep_only(self, worker_ids: Collection[WorkerId]) -> None:
        for worker_id in self._seen.keys() - set(worker_ids):
            self.lost(worker_id)

    def _advance(self, worker_id: WorkerId, seen: _Seen | None, known: KnownWorker) -> None:
        now = _Seen(known.epoch, known.info.incarnation)
        self._seen[worker_id] = now
        if seen is None:
            self._on_continued(worker_id, NO_EPOCH, now.epoch)
        elif now.incarnation and now.incarnation == seen.incarnation:
            self._on_continued(worker_id, seen.epoch, now.epoch)
        else:
            self._on_ended(worker_id)
