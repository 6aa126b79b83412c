"""Block managers with one line changed, for the journal to find: a lost reference, and another order of letting go.

Owns: these two changes.
Does not: run in a worker.
Invariants: apart from its one change each is the BlockManager that serves.
"""

from __future__ import annotations

from worker.kvcache.block_manager import BlockManager


class LeakyManager(BlockManager):
    """Forgets to let go of a sequence's first block."""

    def free(self, seq_id: str) -> None:
        if seq_id in self._tables:
            self._ledger.lock(self._tables[seq_id].blocks[:1])
        super().free(seq_id)


class HeadFirstManager(BlockManager):
    """Lets go of a sequence's blocks from the first to the last, so that heads of chains are longest idle."""

    def free(self, seq_id: str) -> None:
        table = self._tables.pop(seq_id, None)
        if table is not None:
            if self._cache is not None:
                self._insert_tail(self._cache, seq_id, table)
            for block_id in table.blocks:
                self._ledger.release(seq_id, [block_id])
