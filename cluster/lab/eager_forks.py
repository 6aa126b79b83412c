"""EagerForks: a BlockManager that copies every block at a fork, to show what sharing and copy-on-write save.

Owns: that one difference.
Does not: share blocks between sequences at all; it is made without a prefix cache, which would fold equal blocks.
Invariants: as BlockManager; answers are the same, only memory and copies differ.
"""

from __future__ import annotations

from worker.kvcache.block_manager import BlockManager


class EagerForks(BlockManager):
    def fork(self, parent_id: str, child_id: str, num_tokens: int | None = None) -> None:
        super().fork(parent_id, child_id, num_tokens)
        assert self._cache is None, "with a prefix cache equal blocks are folded into one again"
        blocks = self._tables[child_id].blocks
        assert self._ledger.fits(len(blocks)), "the pool is too small for forks that share nothing"
        for index, own in enumerate(self._ledger.take(child_id, len(blocks))):
            shared, blocks[index] = blocks[index], own
            self._ledger.copy(child_id, shared, own)
            self._ledger.release(child_id, [shared])
