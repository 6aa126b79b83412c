"""FastForward: many decode steps at once, exactly as the scheduler would have taken them one by one.

While nothing waits and all rows decode, the only thing that differs between steps is their time, unless a row needs
a new block or fills one:

    step        0   1   2   3   4   5   6   7   8          block size 4, A has 10 tokens, B has 7
    A           .   .  c    a   .   .  c    a   .          a: takes a block, c: the full block enters the cache
    B           .  c    a   .   .  c    a   .   .          at the other steps there is nothing to do

So each row is looked at twice per block, in the order in which the scheduler would come to it.

Owns: finding how far it can go, and booking what these steps change: blocks, tokens, time.
Does not: preempt, finish or admit: it stops right before the step in which the scheduler has to decide something.
Invariants: afterwards sequences, block tables, ref counts, the cache with its order of eviction, and the clock are as
after the same number of plain steps, bit for bit.
"""

from __future__ import annotations

from collections import defaultdict

from cluster.core.step_time import StepShape
from cluster.simulate.engine_view import EngineView
from cluster.simulate.request_log import RequestLog
from cluster.simulate.virtual_clock import VirtualClock
from cluster.simulate.virtual_runner import FILLER, VirtualRunner
from worker.kvcache.block_manager import BlockManager
from worker.sequence import Sequence


class FastForward:
    def __init__(
        self, view: EngineView, runner: VirtualRunner, clock: VirtualClock, log: RequestLog, token_budget: int
    ) -> None:
        self._view = view
        self._runner = runner
        self._clock = clock
        self._log = log
        self._token_budget = token_budget

    def advance(self, until_s: float) -> int:
        """Take steps as long as one begins before `until_s`. Returns how many."""
        rows = self._view.plain_decodes()
        if not rows or len(rows) > self._token_budget:
            return 0
        most = min(row.max_tokens - row.num_output_tokens for row in rows) - 1
        if most < 1:
            return 0
        before_s = self._clock.now
        ends_s = self._take_steps(_DecodeRun(rows, self._view.manager), most, until_s)
        if ends_s:
            self._log.decoded((row.seq_id for row in rows), before_s, ends_s)
        return len(ends_s)

    def _take_steps(self, run: _DecodeRun, most: int, until_s: float) -> list[float]:
        ends_s: list[float] = []
        num_rows, context = len(run.rows), sum(len(row.tokens) for row in run.rows)
        while len(ends_s) < most and self._clock.now < until_s and run.make_room():
            self._runner.book(StepShape(0, 0.0, num_rows, context))
            ends_s.append(self._clock.now)
            context += num_rows
            run.complete()
        run.close()
        return ends_s


class _DecodeRun:
    """Some rows that decode together; `rows` in the scheduler's order."""

    def __init__(self, rows: list[Sequence], manager: BlockManager) -> None:
        self.rows = rows
        self._manager = manager
        self._block_size = manager.block_size
        self._lengths = [len(row.tokens) for row in rows]
        self._step = 0
        self._room_at: defaultdict[int, list[int]] = defaultdict(list, {0: list(range(len(rows)))})
        self._full_at: defaultdict[int, list[int]] = defaultdict(list)
        for index, length in enumerate(self._lengths):
            self._full_at[-length % self._block_size].append(index)

    def make_room(self) -> bool:
        """Slots for each row's newest token. False: memory is short, and the scheduler has to choose a victim."""
        for index in self._room_at.pop(self._step, ()):
            row = self.rows[index]
            if not self._manager.append_token(row.seq_id, self._lengths[index] + self._step):
                return False
            room = len(self._manager.get_block_ids(row.seq_id)) * self._block_size
            self._room_at[room + 1 - self._lengths[index]].append(index)
        return True

    def complete(self) -> None:
        """The newest tokens have their KV; full blocks enter the cache."""
        for index in self._full_at.pop(self._step, ()):
            self._commit(index, self._lengths[index] + self._step)
            self._full_at[self._step + self._block_size].append(index)
        self._step += 1

    def close(self) -> None:
        """Every row as the last whole step left it."""
        if not self._step:
            return
        for index, row in enumerate(self.rows):
            row.num_computed = self._lengths[index] + self._step - 1
            self._commit(index, row.num_computed)
            row.tokens.append(FILLER)
        self._manager.take_copies()

    def _commit(self, index: int, num_computed: int) -> None:
        row = self.rows[index]
        row.tokens.extend([FILLER] * (num_computed - len(row.tokens)))
        self._manager.commit(row.seq_id, row.tokens, num_computed)
