"""Preemption: who gives up its blocks when a running sequence, or a more urgent one, needs them.

Owns: the choice of the victim (the lowest priority, of these the newest) and sending it back to the queue.
Does not: choose who is admitted (admission), or free cached blocks: what a victim computed stays cached while it can.
Invariants: a group goes as a whole; a victim gives its share of the step back; the oldest sequence of the most urgent
class is never a victim of another one, so somebody always goes on.
"""

from __future__ import annotations

from worker.kvcache.block_manager import BlockManager
from worker.scheduling.live_sequences import LiveSequences
from worker.scheduling.waiting_queue import WaitingQueue
from worker.sequence import Sequence, SequenceStatus
from worker.step_budget import StepBudget


class Preemption:
    def __init__(self, manager: BlockManager, live: LiveSequences, queue: WaitingQueue) -> None:
        self._manager = manager
        self._live = live
        self._queue = queue
        self.count = 0

    def make_room(self, seq: Sequence, step: StepBudget) -> bool:
        """Slots for the newest tokens of a running sequence. False: `seq` itself had to go."""
        while not self._manager.append_token(seq.seq_id, len(seq.tokens)):
            if self._manager.drop_pins():
                continue
            self.preempt_one(step)
            if seq.status is not SequenceStatus.RUNNING:
                return False
        return True

    def preempt_less_urgent(self, priority: int, step: StepBudget) -> bool:
        """Send back the least urgent and newest running one, if its priority is lower. False: there is none."""
        if not self._live.running:
            return False
        victim = self._victim()
        if victim.request.priority <= priority:
            return False
        self._preempt(victim, step)
        return True

    def preempt_one(self, step: StepBudget) -> None:
        """Somebody must run."""
        self._preempt(self._victim(), step)

    def _victim(self) -> Sequence:
        """Of equal priorities the last in the list, which is in admission order."""
        newest_first = reversed(self._live.running)
        return max(newest_first, key=lambda seq: seq.request.priority)

    def _preempt(self, victim: Sequence, step: StepBudget) -> None:
        if victim.group is None:
            gone = [victim]
            self._manager.free(victim.seq_id)
            self._live.running.remove(victim)
            victim.status, victim.num_computed = SequenceStatus.WAITING, 0
        else:
            gone = [victim.group.leader, *victim.group.rows]
            self._live.leave_running(victim.group)
            victim.group.release(self._manager)
            victim = victim.group.leader
        for seq in gone:
            step.give_back(seq)
        victim.preemptions += 1
        self.count += 1
        self._queue.add(victim)
