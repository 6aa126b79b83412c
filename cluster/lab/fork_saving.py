"""The fork of article 2.3: A has 50 tokens, B goes on from its first 30 and writes. What do they share?

    prefix blocks   those that hold any of the first 30 tokens: of A, and of B
    apart           each of the two has its own
    shared          A's and B's together, each counted once

A block that is not full when B writes into it is copied, so B has a block of its own at the border, unless the fork
is at the end of a block.

Owns: running the fork on the production classes for any block size and prefix, and the scenes to draw.
Does not: draw (block_picture) or judge (beam).
Invariants: block numbers are read from the block tables after B's first write.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cluster.lab.blocks import Scene, Stage


class ForkSaving(NamedTuple):
    """Blocks that hold the common prefix. copies: blocks copied by B's first write.  unseen: A's blocks that B never
    held although they hold tokens of A."""

    apart: int
    shared: int
    copies: int
    unseen: int

    @property
    def saved(self) -> float:
        return 1 - self.shared / self.apart


def fork_saving(prefix: int, total: int, block_size: int) -> ForkSaving:
    """A has `total` tokens, B is forked behind `prefix` of them and writes one token."""
    stage = _forked(prefix, total, block_size)
    held_before = set(stage.manager.get_block_ids("B"))
    stage.write("B", [total])
    ours, theirs = stage.manager.get_block_ids("A"), stage.manager.get_block_ids("B")
    stage.manager.check_invariants()
    blocks = -(-prefix // block_size)
    return ForkSaving(
        apart=2 * blocks,
        shared=len({*ours[:blocks], *theirs[:blocks]}),
        copies=len(stage.copies),
        unseen=len(set(ours) - held_before),
    )


def fork_scenes() -> Iterator[Scene]:
    stage = Stage()
    stage.start("A", list(range(1000, 1050)))
    yield stage.scene("A has 50 tokens", "4 blocks of 16.")
    stage.fork("A", "B", 30)
    yield stage.scene("B is forked at token 30", "B holds A's blocks 0 and 1, and none of those behind token 30.")
    stage.write("B", [3000])
    yield stage.scene("B writes token 30", "Block 1 holds tokens 16 to 31, so B gets a copy of it and writes there.")


def _forked(prefix: int, total: int, block_size: int) -> Stage:
    stage = Stage(num_blocks=2 * (total // block_size + 2), block_size=block_size)
    stage.start("A", list(range(total)))
    stage.fork("A", "B", prefix)
    return stage
