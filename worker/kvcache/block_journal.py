"""BlockJournal: what happened to which block, in order: allocate, share, copy, free, evict.

    step=12 allocate seq=r1 block=7 refs=1 free=40
    step=12 copy     seq=r1 block=7 from=3 refs=1 free=40

A line holds the ref count and the number of free blocks as they are after it. `free` takes one holder away; the block
joins the free list only when it was the last one and the cache does not keep the block. An `evict` names the sequence
that needed the memory; `-` is nobody. There are no times and no addresses in it: steps are counted, and `canonical`
numbers the blocks in the order of their first appearance, so two runs of the same work have the same journal.

Owns: the form of an entry, the step counter, canonical numbers, the first difference of two journals.
Does not: decide what is worth a line (BlockLedger reports), keep entries (`emit` does) or write files (cluster.lab).
Invariants: entries are in the order of the operations; a refused operation leaves none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from worker.kvcache.block_pool import BlockPool

logger = logging.getLogger(__name__)

NOBODY = "-"
CONTEXT = 3


class BlockAction(StrEnum):
    ALLOCATE = "allocate"
    SHARE = "share"
    COPY = "copy"
    FREE = "free"
    EVICT = "evict"


class BlockEntry(NamedTuple):
    """One block, one action. `source`: the block that a copy reads."""

    step: int
    action: BlockAction
    seq_id: str
    block: int
    refs: int
    free: int
    source: int | None = None

    def __str__(self) -> str:
        source = "" if self.source is None else f" from={self.source}"
        where = f"seq={self.seq_id} block={self.block}{source}"
        return f"step={self.step} {self.action} {where} refs={self.refs} free={self.free}"


class Difference(NamedTuple):
    """Two journals agree in their first `agreed` entries, of which `before` are the last few. None: that one ended."""

    agreed: int
    before: tuple[BlockEntry, ...]
    a: BlockEntry | None
    b: BlockEntry | None

    def __str__(self) -> str:
        head = [f"first difference at entry {self.agreed + 1}", *(f"    {entry}" for entry in self.before)]
        return "\n".join([*head, f"  a {self.a or '(ends here)'}", f"  b {self.b or '(ends here)'}"])


class BlockJournal:
    """Hands every entry to `emit`: a list's `append`, or `log_entry`."""

    def __init__(self, emit: Callable[[BlockEntry], None]) -> None:
        self._emit = emit
        self._step = 1

    def end_step(self) -> None:
        self._step += 1

    def record(self, action: BlockAction, seq_id: str, blocks: Sequence[int], pool: BlockPool) -> None:
        """`action` has just happened to all of `blocks`, in this order, and nothing else since."""
        gains = [_gain(action, block_id, pool) for block_id in blocks]
        free = pool.num_free - sum(gains)
        for block_id, gain in zip(blocks, gains, strict=True):
            free += gain
            self._emit(BlockEntry(self._step, action, seq_id, block_id, pool.ref_count(block_id), free))

    def record_copy(self, seq_id: str, source: int, target: int, pool: BlockPool) -> None:
        refs = pool.ref_count(target)
        self._emit(BlockEntry(self._step, BlockAction.COPY, seq_id, target, refs, pool.num_free, source))


def log_entry(entry: BlockEntry) -> None:
    """What `--log-blocks` prints."""
    logger.info("block %s", entry)


def canonical(entries: Iterable[BlockEntry]) -> list[BlockEntry]:
    """The same entries with blocks numbered 0, 1, .. in the order in which they first appear."""
    numbers: dict[int, int] = {}
    renamed: list[BlockEntry] = []
    for entry in entries:
        source = None if entry.source is None else numbers.setdefault(entry.source, len(numbers))
        renamed.append(entry._replace(block=numbers.setdefault(entry.block, len(numbers)), source=source))
    return renamed


def diff(a: Iterable[BlockEntry], b: Iterable[BlockEntry]) -> Difference | None:
    """Where two journals first differ, block numbers aside; None when they do not."""
    left, right = canonical(a), canonical(b)
    shorter = min(len(left), len(right))
    index = next((i for i in range(shorter) if left[i] != right[i]), shorter)
    if index == len(left) == len(right):
        return None
    before = tuple(left[max(index - CONTEXT, 0) : index])
    return Difference(index, before, *(side[index] if index < len(side) else None for side in (left, right)))


def _gain(action: BlockAction, block_id: int, pool: BlockPool) -> int:
    """By how much the number of free blocks grew."""
    if action is BlockAction.ALLOCATE:
        return -1
    if action is BlockAction.FREE:
        return int(pool.ref_count(block_id) == 0 and not pool.is_cached(block_id))
    return int(action is BlockAction.EVICT)
