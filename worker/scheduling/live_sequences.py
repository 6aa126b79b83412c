"""LiveSequences: every sequence that is not finished, and which of them run.

Owns: the table by id, the running list, and taking sequences out of both with their blocks.
Does not: decide anything, or know who waits in which order (waiting_queue).
Invariants: running is in admission order, a group's rows in the place of their leader; what is finished is in neither
and holds no blocks; a group's leader has the request's own id.
"""

from __future__ import annotations

from collections.abc import Iterator

from worker.kvcache.block_manager import BlockManager
from worker.sequence import Sequence, SequenceStatus
from worker.sequence_group import SequenceGroup


class LiveSequences:
    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._by_id: dict[str, Sequence] = {}
        self.running: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._by_id

    def get(self, seq_id: str) -> Sequence | None:
        return self._by_id.get(seq_id)

    def __getitem__(self, seq_id: str) -> Sequence:
        return self._by_id[seq_id]

    def add(self, seq: Sequence) -> None:
        self._by_id[seq.seq_id] = seq

    def register(self, group: SequenceGroup) -> list[Sequence]:
        """The group's live rows can be found by their ids from here on."""
        self._by_id |= {row.seq_id: row for row in group.rows}
        return list(group.rows)

    def replace(self, leader: Sequence, group: SequenceGroup) -> None:
        """The group's rows run in the leader's place."""
        place = self.running.index(leader)
        self.running[place : place + 1] = self.register(group)

    def end_row(self, row: Sequence) -> None:
        """One of several samples is complete; the group has let go of its blocks."""
        self.running.remove(row)
        del self._by_id[row.seq_id]

    def leave_running(self, group: SequenceGroup) -> None:
        """The leader and all rows; only the leader can still be found."""
        members = {group.leader.seq_id, *(row.seq_id for row in group.rows)}
        self.running = [seq for seq in self.running if seq.seq_id not in members]
        for row in group.rows:
            self._by_id.pop(row.seq_id, None)

    def drop(self, seq: Sequence) -> None:
        """A plain sequence, or the leader of a group, which goes with all its rows."""
        if seq.group is not None:
            self.leave_running(seq.group)
            seq.group.release(self._manager)
        self.finish(seq)

    def finish(self, seq: Sequence) -> None:
        """A plain sequence, or the leader of a group whose rows are gone."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
        self._manager.free(seq.seq_id)
        seq.status = SequenceStatus.FINISHED
        del self._by_id[seq.seq_id]
