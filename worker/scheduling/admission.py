"""Admission: from the waiting queue into the running list, when blocks of the whole prompt can be reserved.

    next in the queue -> shares a prefix that is being computed: held
                      -> no seat or no memory: less urgent ones give theirs, or nobody of its class or below comes in
                      -> blocks for all its tokens are reserved: it runs, with the rest of the step's budget

The whole prompt is reserved, so two half-loaded prompts can never block each other. While others run, a share of the
pool (the watermark) stays free for what they are about to generate.

Owns: the order of these questions, and what counts as a lookup and a hit.
Does not: order the queue, choose victims, or match prefixes (waiting_queue, preemption, block_manager).
Invariants: never more seats than `max_num_seqs`; a refused start changes nothing; when nobody runs the first in the
queue always starts, because the gate let in only what fits alone.
"""

from __future__ import annotations

from worker.kvcache.block_manager import BlockManager
from worker.request_gate import SchedulerLimits
from worker.scheduling.live_sequences import LiveSequences
from worker.scheduling.preemption import Preemption
from worker.scheduling.prefix_holds import PrefixHolds
from worker.scheduling.waiting_queue import WaitingQueue
from worker.sequence import Sequence, SequenceStatus
from worker.step_budget import StepBudget


class Admission:
    def __init__(
        self,
        manager: BlockManager,
        limits: SchedulerLimits,
        live: LiveSequences,
        queue: WaitingQueue,
        holds: PrefixHolds,
        preemption: Preemption,
    ) -> None:
        self._manager = manager
        self._limits = limits
        self._live = live
        self._queue = queue
        self._holds = holds
        self._preemption = preemption
        self._watermark_blocks = int(limits.watermark * manager.capacity_tokens) // manager.block_size
        self.query_tokens = 0
        self.hit_tokens = 0
        self.num_admitted = 0

    def admit(self, seq: Sequence, step: StepBudget, prefilling: list[Sequence], now: float) -> bool:
        """`seq` is the queue's first. False: it cannot run yet, and nobody of its class or below may pass it.

        prefilling: running sequences with uncomputed prompts; what is admitted joins them.
        """
        if self._holds.try_hold(seq, prefilling, now):
            return True
        started = self._start_somehow(seq, step)
        if not started:
            return False
        self._queue.remove(seq)
        self.num_admitted += 1
        for new in started:
            self._live.running.append(new)
            prefilling.append(new)
            if step.left > 0 and self._manager.append_token(new.seq_id, len(new.tokens)):
                step.take(new)
        return True

    def _start_somehow(self, seq: Sequence, step: StepBudget) -> list[Sequence]:
        """Start it, at the cost of pins and of less urgent ones where that helps."""
        started = self._try_to_start(seq)
        if started or not self._would_start_without_less_urgent(seq):
            return started
        while not started and self._preemption.preempt_less_urgent(seq.request.priority, step):
            started = self._try_to_start(seq)
        return started

    def _try_to_start(self, seq: Sequence) -> list[Sequence]:
        if self._free_seats() < _seats(seq):
            return []
        started = self._start(seq)
        return self._start(seq) if not started and self._manager.drop_pins() else started

    def _would_start_without_less_urgent(self, seq: Sequence) -> bool:
        """Whether `seq` could start if everybody less urgent went: else they would go for nothing."""
        running, priority = self._live.running, seq.request.priority
        stay = [other for other in running if other.request.priority <= priority]
        if len(stay) == len(running):
            return False
        if sum(map(_seats, stay)) + _seats(seq) > self._limits.max_num_seqs:
            return False
        if not stay:
            return True  # the gate let in only what fits alone
        kept = {block for other in stay for block in self._manager.get_block_ids(other.seq_id)}
        return len(kept) + self._blocks_beside(stay, seq) <= self._manager.counts().total

    def _blocks_beside(self, stay: list[Sequence], seq: Sequence) -> int:
        """Blocks that `seq` needs to start, the watermark included, beyond those of `stay`."""
        size, group = self._manager.block_size, seq.group
        if group is not None and not seq.tokens:
            return sum(-(-row.num_tokens // size) for row in group.rows)
        wanted = -(-seq.num_tokens // size) + self._watermark_blocks
        wanted += 0 if group is None else group.spare_blocks(size)
        if seq.scores_prompt:
            return wanted
        shared = max(min(other.num_computed, other.num_shared_tokens(seq)) for other in stay)
        return wanted - min(shared, self._manager.cached_prefix(seq.lookup, seq.request.cache_salt)) // size

    def _free_seats(self) -> int:
        return self._limits.max_num_seqs - sum(_seats(seq) for seq in self._live.running)

    def _start(self, seq: Sequence) -> list[Sequence]:
        """Give a waiting sequence its blocks. Returns what runs now; nothing when memory is short."""
        group, request = seq.group, seq.request
        kept_free = self._watermark_blocks if self._live.running else 0
        if group is not None and not seq.tokens:
            if not group.allocate_rows(self._manager):
                return []
            self.query_tokens += seq.num_prompt_tokens if seq.preemptions == 0 else 0
            return self._live.register(group)
        scores = seq.scores_prompt
        cached = self._manager.allocate(
            seq.seq_id,
            seq.lookup,
            request.cache_salt,
            spare_blocks=kept_free + (0 if group is None else group.spare_blocks(self._manager.block_size)),
            need_logits=not seq.computes_only,
            read_cache=not scores,
        )
        if cached is None:
            return []
        if scores:
            seq.prompt_logprobs.clear()  # a preempted one begins again
        seq.status, seq.num_computed = SequenceStatus.RUNNING, cached
        if seq.first_cached is None:  # a resumed sequence hits its own blocks, which is not a cache hit
            seq.first_cached = cached
            self.query_tokens += 0 if scores else seq.num_prompt_tokens
            self.hit_tokens += cached
        if group is None or seq.num_uncomputed:
            return [seq]
        group.spread(self._manager)  # the whole prompt was in the cache
        return self._live.register(group)


def _seats(seq: Sequence) -> int:
    return 1 if seq.group is None else seq.group.seats_of(seq)
