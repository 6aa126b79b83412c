"""Scheduler: which tokens run in the next step, and what a step's result means for each sequence.

One token budget per step is shared by decode rows (one token each, first) and prefill pieces (the rest). Only
uncached tokens cost budget. Prompts go in the order of their priority: those that run already before those that wait.
When a running sequence needs a block and none is left, the least urgent and newest one is preempted, with its whole
group: it keeps its tokens, its computed blocks stay cached, and it waits before those that never ran.

    add -> WaitingQueue -> Admission -> running -> schedule -> (runner) -> StepResults -> deltas
               ^  PrefixHolds              |
               +------- Preemption --------+

Owns: the door (bounds of the queue, ids, pause, drain) and the division of a step's budget.
Does not: see blocks or tree nodes (block_manager), run models, judge requests (request_gate), compile grammars
(grammar_port), or end what is late (worker.deadlines).
Invariants: budget never exceeded; a step with work makes progress, because every request that was let in fits into the
pool alone; a refused request leaves no trace; a paused scheduler keeps everything and runs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq

from cluster.core.errors import InvalidRequest, Overloaded
from cluster.core.request import GenerationRequest, TokenDelta
from worker.batch import Batch, ScheduledSeq
from worker.grammar_port import GrammarProgress
from worker.group_stops import Decode
from worker.kvcache.block_manager import BlockManager
from worker.request_gate import RequestGate, SchedulerLimits
from worker.runner import Sampled
from worker.scheduling.admission import Admission
from worker.scheduling.live_sequences import LiveSequences
from worker.scheduling.preemption import Preemption
from worker.scheduling.prefix_holds import PrefixHolds
from worker.scheduling.step_results import StepResults
from worker.scheduling.waiting_queue import WaitingQueue
from worker.sequence import Sequence, SequenceStatus
from worker.sequence_group import SequenceGroup
from worker.step_budget import StepBudget


class Scheduler:
    """Single-threaded: called by the engine between steps. `clock`: seconds. `decode`: for stop strings in groups."""

    def __init__(
        self,
        manager: BlockManager,
        limits: SchedulerLimits,
        clock: Callable[[], float],
        decode: Decode | None = None,
    ) -> None:
        self._clock = clock
        self._decode = decode
        self._manager = manager
        self._limits = limits
        self._gate = RequestGate(manager, limits)
        self._live = LiveSequences(manager)
        self._queue = WaitingQueue(
            self._cached_prefix, lambda: manager.cache_changes, limits.ageing_s, prefix_first=limits.prefix_first
        )
        self._holds = PrefixHolds(manager, self._queue, limits.ageing_s, enabled=limits.hold_back)
        self._preemption = Preemption(manager, self._live, self._queue)
        self._admission = Admission(manager, limits, self._live, self._queue, self._holds, self._preemption)
        self._results = StepResults(manager, self._live)
        self._arrivals = 0
        self.paused = False
        self.draining = False

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_held(self) -> int:
        """Of those that wait, the ones that wait for a prefix which is being computed."""
        return self._queue.num_held

    @property
    def num_waiting_tokens(self) -> int:
        return self._queue.num_tokens

    @property
    def num_running(self) -> int:
        return len(self._live.running)

    @property
    def num_preemptions(self) -> int:
        return self._preemption.count

    @property
    def query_tokens(self) -> int:
        return self._admission.query_tokens

    @property
    def hit_tokens(self) -> int:
        return self._admission.hit_tokens

    @property
    def has_work(self) -> bool:
        return len(self._live) > 0

    @property
    def running(self) -> tuple[Sequence, ...]:
        """In admission order."""
        return tuple(self._live.running)

    def sequences(self) -> Iterator[Sequence]:
        return iter(self._live)

    def uncached_tokens(self) -> Mapping[str, int]:
        """Tokens still to prefill, by router id: exact for what runs, estimated for what waits."""
        tokens = Counter(self._queue.uncached_tokens)
        for seq in self._live.running:
            if (uncached := seq.uncached_tokens) > 0:
                tokens[seq.request.router_id] += uncached
        return tokens

    def grammars(self) -> list[GrammarProgress]:
        """Of the sequences that can choose a token in the next step."""
        return [seq.grammar for seq in self._live.running if seq.grammar is not None and seq.num_uncomputed == 1]

    def check(self, request: GenerationRequest, num_ahead: int = 0, tokens_ahead: int = 0) -> int:
        """The bound on new tokens. Raises InvalidRequest, RequestTooLong or Overloaded.

        num_ahead, tokens_ahead: requests that wait elsewhere, and their prompt tokens.
        """
        if self.draining:
            raise Overloaded("this engine finishes what it has and takes no more requests")
        max_tokens = self._gate.max_tokens(request)
        waiting = len(self._queue) + num_ahead
        if waiting >= self._limits.max_queue:
            raise Overloaded(f"the queue is full ({self._limits.max_queue} requests)")
        most, prompt = self._limits.max_queue_tokens, len(request.prompt_token_ids)
        if most is not None and waiting and self._queue.num_tokens + tokens_ahead + prompt > most:
            raise Overloaded(f"the queue is full ({most} tokens)")
        if "/" in request.request_id:
            raise InvalidRequest("request_id", "request_id must not contain / (rows of groups are named with it)")
        if request.request_id in self._live:
            raise InvalidRequest("request_id", f"request {request.request_id} is already running")
        return max_tokens

    def add(
        self, request: GenerationRequest, grammar: GrammarProgress | None = None, *, max_tokens: int | None = None
    ) -> None:
        """Queue a request, with the beginning of its grammar if it has one. Raises as `check`; nothing has changed.

        max_tokens: what `check` has just answered, so that a long prompt is not looked through twice. One with a
        grammar was let in when it came, and has waited for the grammar since.
        """
        if max_tokens is None:
            max_tokens = self.check(request) if grammar is None else self._gate.max_tokens(request)
        if request.sampling.num_rows > 1 or request.sampling.beam_width:
            seq = SequenceGroup(request, max_tokens, self._limits.eos_token_ids, self._decode, grammar).leader
        else:
            seq = Sequence(request, max_tokens, self._limits.eos_token_ids)
            seq.grammar = grammar
        seq.arrival, seq.arrived_at = self._arrivals, self._clock()
        self._arrivals += 1
        self._live.add(seq)
        self._queue.add(seq)

    def cancel(self, request_id: str) -> bool:
        """End a request in any state and free its blocks. False when it is not here (any more)."""
        seq = self._live.get(request_id)
        if seq is None or seq.seq_id != seq.request.request_id:
            return False
        if seq.status is SequenceStatus.WAITING:
            self._queue.remove(seq)
        self._live.drop(seq)
        return True

    def preempt_one(self) -> bool:
        """Send the least urgent and newest running request back to the queue. False when nothing runs."""
        if not self._live.running:
            return False
        self._preemption.preempt_one(StepBudget(self._limits.token_budget))
        return True

    def schedule(self) -> Batch:
        """The next step's batch; empty only when there is no work, or when it is paused."""
        if self.paused:
            return Batch(())
        step = StepBudget(self._limits.token_budget)
        preempted_before = self._preemption.count
        prefilling = self._decode_rows(step)
        admits = self._preemption.count == preempted_before  # else memory is short
        if len(self._queue):
            now = self._clock()
            self._holds.release(now)
            self._queue.refresh()
            self._prefill_and_admit(prefilling, step, now, admits)
        else:
            self._prefill(prefilling, step)
        seqs = tuple(self._scheduled(self._live[seq_id], count) for seq_id, count in step.tokens.items())
        return Batch(seqs, tuple(self._manager.take_copies()) if seqs else ())

    def complete(self, batch: Batch, sampled: Seq[Sampled]) -> list[TokenDelta]:
        """Book a finished step: KV is there, blocks enter the cache, new tokens are appended, ends are found."""
        return self._results.book(batch, sampled)

    def _decode_rows(self, step: StepBudget) -> list[Sequence]:
        """One token for each running sequence that only needs its next one. Returns the others, most urgent first."""
        prefilling: list[Sequence] = []
        tokens, has_room = step.tokens, self._manager.append_token
        rows = self._live.running.copy()
        if len(rows) > step.left:
            rows.sort(key=_priority)  # stable: within a class in admission order
        for seq in rows:
            count = len(seq.tokens)
            if count - seq.num_computed != 1 or count <= seq.num_prompt_tokens:
                prefilling.append(seq)
                continue
            decodes = step.left > 0 and seq.status is SequenceStatus.RUNNING
            if decodes and (has_room(seq.seq_id, count) or self._preemption.make_room(seq, step)):
                tokens[seq.seq_id] = 1
                step.left -= 1
        if len(prefilling) > 1:
            prefilling.sort(key=_priority)
        return prefilling

    def _prefill(self, prefilling: Seq[Sequence], step: StepBudget) -> None:
        for seq in prefilling:
            running = seq.status is SequenceStatus.RUNNING
            if running and step.left and seq.num_uncomputed and self._preemption.make_room(seq, step):
                step.take(seq)

    def _prefill_and_admit(self, prefilling: list[Sequence], step: StepBudget, now: float, admits: bool) -> None:
        """Class by class: first the pieces of those that run, then those that come in."""
        pieces = prefilling.copy()
        place = 0
        while step.left > 0:
            waiting = self._queue.first(now) if admits else None
            end = place
            while end < len(pieces) and (waiting is None or _priority(pieces[end]) <= _priority(waiting)):
                end += 1
            preempted_before = self._preemption.count
            self._prefill(pieces[place:end], step)
            place = end
            admits = admits and self._preemption.count == preempted_before
            if waiting is None or not admits:
                if place == len(pieces):
                    return
            elif step.left > 0:
                admits = self._admission.admit(waiting, step, prefilling, now)

    def _scheduled(self, seq: Sequence, count: int) -> ScheduledSeq:
        start, end = seq.num_computed, seq.num_computed + count
        if self._limits.strict_blocks:
            self._manager.check_writable(seq.seq_id, start, end)
        blocks = self._manager.get_block_ids(seq.seq_id)
        sample = end == len(seq.tokens) and not seq.computes_only
        if seq.extras is None and seq.grammar is None:
            return ScheduledSeq(seq.seq_id, seq.tokens[start:end], start, blocks, sample, seq.sampling)
        sample = sample or seq.scores_prompt
        whole = (seq.seq_id, seq.tokens[start:end], start, blocks, sample, seq.sampling, seq.extras_for(end))
        return ScheduledSeq(*whole, seq.grammar)

    def _cached_prefix(self, seq: Sequence) -> int:
        """How much of it the cache would save now."""
        return 0 if seq.scores_prompt else self._manager.cached_prefix(seq.lookup, seq.request.cache_salt)


def _priority(seq: Sequence) -> int:
    return seq.request.priority
