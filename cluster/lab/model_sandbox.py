"""ModelSandbox: the real model and its pool without a block manager, so that any block can be put into any table.

Owns: handing out blocks, and greedy answers over tables that an experiment made.
Does not: check anything; that is the point.
Invariants: what is computed goes through the production runner; a block is handed out once between two `reset`s.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.lab.driven_engine import GREEDY
from worker.batch import Batch, ScheduledSeq
from worker.model_runner import ModelRunner


class ModelSandbox:
    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._next = 0

    @property
    def block_size(self) -> int:
        return self.runner.facts.block_size

    def reset(self) -> None:
        self._next = 0

    def table(self, tokens: int) -> list[int]:
        """Fresh blocks for so many tokens."""
        count = -(-tokens // self.block_size)
        first, self._next = self._next, self._next + count
        assert self._next <= self.runner.facts.num_blocks, "the sandbox's pool is too small"
        return list(range(first, self._next))

    def feed(self, tokens: Sequence[int], table: Sequence[int], start: int = 0) -> int:
        """Compute `tokens` at positions from `start` on; the token that follows."""
        row = ScheduledSeq("sandbox", list(tokens), start, list(table), True, GREEDY)
        return self.runner.run(Batch((row,)))[0].token_id

    def copy(self, source: int, target: int) -> None:
        self.runner.pool.copy_block(source, target)

    def answer(self, tokens: Sequence[int], count: int, table: Sequence[int], start: int = 0) -> tuple[int, ...]:
        """`count` greedy tokens behind `tokens`, which begin at `start`; what is before is in the table's blocks."""
        found = [self.feed(tokens, table, start)]
        position = start + len(tokens)
        while len(found) < count:
            found.append(self.feed(found[-1:], table, position))
            position += 1
        return tuple(found)

    def alone(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """The right answer, computed from nothing."""
        return self.answer(tokens, count, self.table(len(tokens) + count))
