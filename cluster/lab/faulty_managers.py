"""Block managers with one mistake each, to show what catches it.

Owns: the mistakes: a reference given back twice, a block used without one, a missing copy.
Does not: serve anything, or forget a reference (changed_managers does).
Invariants: each differs from BlockManager in one method and in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker.kvcache.block_manager import BlockManager


class TwiceFreeingManager(BlockManager):
    """Gives the last block of a sequence back twice."""

    def free(self, seq_id: str) -> None:
        table = self._tables.get(seq_id)
        last = table.blocks[-1:] if table is not None else []
        super().free(seq_id)
        self._ledger.release(seq_id, last)


class AliasingManager(BlockManager):
    """Puts another sequence's first block into a new table, without counting the reference."""

    def allocate(
        self,
        seq_id: str,
        tokens: Sequence[int],
        salt: str = "",
        *,
        spare_blocks: int = 0,
        need_logits: bool = True,
        read_cache: bool = True,
    ) -> int | None:
        other = next(iter(self._tables.values()), None)
        cached = super().allocate(
            seq_id, tokens, salt, spare_blocks=spare_blocks, need_logits=need_logits, read_cache=read_cache
        )
        if cached is not None and other is not None:
            blocks = self._tables[seq_id].blocks
            self._ledger.release(seq_id, blocks[:1])
            blocks[0] = other.blocks[0]
        return cached


class UncopiedManager(BlockManager):
    """Writes into shared blocks instead of copying them first."""

    _blind = False

    def append_token(self, seq_id: str, num_tokens: int) -> bool:
        self._blind = True
        try:
            return super().append_token(seq_id, num_tokens)
        finally:
            self._blind = False

    def _writable(self, block_id: int, position: int) -> bool:
        return self._blind or super()._writable(block_id, position)
