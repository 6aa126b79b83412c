"""EngineView: the little that the simulator has to see inside an engine.

Owns: reaching the scheduler's queues and the block manager.
Does not: change anything.
Invariants: the one place of the simulator that knows where an engine keeps them.
"""

from __future__ import annotations

from worker.engine import Engine
from worker.kvcache.block_manager import BlockManager
from worker.sequence import Sequence


class EngineView:
    def __init__(self, engine: Engine) -> None:
        self._scheduler = engine._scheduler
        self.manager: BlockManager = engine._manager

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    def plain_decodes(self) -> list[Sequence]:
        """All live sequences in the order in which they run, if each of them only waits for its next token.

        Empty when any has something else to do, or nothing runs.
        """
        scheduler = self._scheduler
        if scheduler.num_waiting:
            return []
        rows = scheduler.running
        for row in reversed(rows):  # whoever still prefills came last
            if not row.decoding or row.group is not None or row.extras is not None or row.grammar is not None:
                return []
        return list(rows)
