"""Scheduler: which tokens run in the next step, and what a step's result means for each sequence.

One token budget per step is shared by decode rows (one token each, first) and prefill pieces (the rest). Only
uncached tokens cost budget. A waiting sequence is admitted when the blocks of its whole prompt can be reserved, so
two half-loaded prompts can never block each other. One that shares a prefix which is being computed waits until it is
there. When a running sequence needs a block and none is left, the newest running one is preempted, with its whole
group: it keeps its tokens, its computed blocks stay cached, and it waits at the head.

Owns: the waiting queue, the running list, preemption, moving grammars on, and why a sequence ends.
Does not: see blocks or tree nodes (block_manager), run models, know time, judge requests (request_gate) or compile
grammars (grammar_port).
Invariants: budget never exceeded; running is in admission order; a step with work makes progress, because every
request that was let in fits into the pool alone; a refused request leaves no trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from cluster.core.errors import InvalidRequest, KvrayError, Overloaded
from cluster.core.request import FinishReason, GenerationRequest, TokenDelta
from worker.batch import Batch, ScheduledSeq
from worker.grammar_port import GrammarProgress
from worker.group_stops import Decode
from worker.kvcache.block_manager import BlockManager
from worker.request_gate import RequestGate, SchedulerLimits
from worker.runner import Sampled
from worker.sequence import Sequence, SequenceStatus
from worker.sequence_group import SequenceGroup
from worker.step_budget import StepBudget


class Scheduler:
    """Single-threaded: called by the engine between steps. `decode`: for stop strings within groups."""

    def __init__(self, manager: BlockManager, limits: SchedulerLimits, decode: Decode | None = None) -> None:
        self._decode = decode
        self._manager = manager
        self._limits = limits
        self._gate = RequestGate(manager, limits)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}  # by sequence id; a group's leader has the request's own
        self.num_preemptions = 0
        self.query_tokens = 0
        self.hit_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    def sequences(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def grammars(self) -> list[GrammarProgress]:
        """Of the sequences that can choose a token in the next step."""
        return [seq.grammar for seq in self._running if seq.grammar is not None and seq.num_uncomputed == 1]

    def check(self, request: GenerationRequest, num_ahead: int = 0) -> int:
        """The bound on new tokens. Raises InvalidRequest, RequestTooLong or Overloaded.

        num_ahead: requests that wait elsewhere.
        """
        max_tokens = self._gate.max_tokens(request)
        if len(self._waiting) + num_ahead >= self._limits.max_queue:
            raise Overloaded(f"the queue is full ({self._limits.max_queue} requests)", retry_after_s=1.0)
        if "/" in request.request_id:
            raise InvalidRequest("request_id", "request_id must not contain / (rows of groups are named with it)")
        if request.request_id in self._by_id:
            raise InvalidRequest("request_id", f"request {request.request_id} is already running")
        return max_tokens

    def add(self, request: GenerationRequest, grammar: GrammarProgress | None = None) -> None:
        """Queue a request, with the beginning of its grammar if it has one. Raises as `check`; nothing has changed."""
        max_tokens = self.check(request)
        if request.sampling.num_rows > 1 or request.sampling.beam_width:
            seq = SequenceGroup(request, max_tokens, self._limits.eos_token_ids, self._decode, grammar).leader
        else:
            seq = Sequence(request, max_tokens, self._limits.eos_token_ids)
            seq.grammar = grammar
        seq.expected_cached = self._cached_prefix(seq)
        self._by_id[seq.seq_id] = seq
        self._waiting.append(seq)

    def cancel(self, request_id: str) -> bool:
        """End a request in any state and free its blocks. False when it is not here (any more)."""
        seq = self._by_id.get(request_id)
        if seq is None or seq.seq_id != seq.request.request_id:
            return False
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        self._drop(seq)
        return True

    def schedule(self) -> Batch:
        """The next step's batch; empty only when there is no work."""
        step = StepBudget(self._limits.token_budget)
        preempted_before = self.num_preemptions
        prefilling: list[Sequence] = []
        tokens, has_room = step.tokens, self._manager.append_token
        for seq in self._running.copy():
            count = len(seq.tokens)
            if count - seq.num_computed != 1 or count == seq.num_prompt_tokens:
                prefilling.append(seq)
                continue
            decodes = step.left > 0 and seq.status is SequenceStatus.RUNNING
            if decodes and (has_room(seq.seq_id, count) or self._make_room(seq, step)):
                tokens[seq.seq_id] = 1
                step.left -= 1
        for seq in prefilling:
            running = seq.status is SequenceStatus.RUNNING
            if running and step.left and seq.num_uncomputed and self._make_room(seq, step):
                step.take(seq)
        if self.num_preemptions == preempted_before:
            self._admit(step)
        seqs = tuple(self._scheduled(self._by_id[seq_id], count) for seq_id, count in step.tokens.items())
        return Batch(seqs, tuple(self._manager.take_copies()) if seqs else ())

    def complete(self, batch: Batch, sampled: Seq[Sampled]) -> list[TokenDelta]:
        """Book a finished step: KV is there, blocks enter the cache, new tokens are appended, ends are found."""
        deltas: list[TokenDelta] = []
        results = iter(sampled)
        searches: dict[str, SequenceGroup] = {}
        for item in batch.seqs:
            result = next(results) if item.sample else None
            seq = self._by_id.get(item.seq_id)
            if seq is None:  # its request failed in this step, with another row
                continue
            seq.num_computed = end = item.start + len(item.token_ids)
            self._manager.commit(item.seq_id, seq.tokens, end, tail=item.sample and end == seq.num_prompt_tokens)
            if result is None:
                self._spread_when_computed(seq)
                continue
            if item.extras is not None and self._only_scores(seq, result):
                continue
            if seq.group is None:
                deltas.append(self._append(seq, result))
            elif seq.group.search is None:
                deltas += self._append_sample(seq, result, seq.group)
            else:
                seq.candidates, seq.candidate_logprobs = result.candidates, result.candidate_logprobs
                searches[seq.request.request_id] = seq.group
        for group in searches.values():
            if all(row.candidates for row in group.rows):
                deltas += self._advance(group)
        return deltas

    def _make_room(self, seq: Sequence, step: StepBudget) -> bool:
        """Slots for the newest tokens, preempting the newest sequences if needed. False: `seq` itself had to go."""
        while not self._manager.append_token(seq.seq_id, len(seq.tokens)):
            if self._manager.drop_pins():
                continue
            self._preempt(self._running[-1], step)
            if seq.status is not SequenceStatus.RUNNING:
                return False
        return True

    def _preempt(self, victim: Sequence, step: StepBudget) -> None:
        if victim.group is None:
            gone = [victim]
            self._manager.free(victim.seq_id)
            self._running.remove(victim)
            victim.status, victim.num_computed = SequenceStatus.WAITING, 0
        else:
            gone = [victim.group.leader, *victim.group.rows]
            self._leave_running(victim.group)
            victim.group.release(self._manager)
            victim = victim.group.leader
        for seq in gone:
            step.give_back(seq)
        victim.preemptions += 1
        victim.expected_cached = self._cached_prefix(victim)
        self.num_preemptions += 1
        self._waiting.appendleft(victim)

    def _admit(self, step: StepBudget) -> None:
        if not self._waiting:
            return
        held: list[Sequence] = []
        seats = self._limits.max_num_seqs - sum(_seats(seq) for seq in self._running)
        while self._waiting and step.left > 0 and _seats(self._waiting[0]) <= seats:
            seq = self._waiting[0]
            if self._waits_for_a_prefix(seq):
                held.append(self._waiting.popleft())
                continue
            started = self._start(seq)
            if not started and self._manager.drop_pins():
                continue
            if not started:
                break
            self._waiting.popleft()
            seats -= _seats(seq)
            for new in started:
                self._running.append(new)
                if step.left > 0 and self._manager.append_token(new.seq_id, len(new.tokens)):
                    step.take(new)
        self._waiting.extendleft(reversed(held))

    def _start(self, seq: Sequence) -> list[Sequence]:
        """Give a waiting sequence its blocks. Returns what runs now; nothing when memory is short."""
        group, request = seq.group, seq.request
        if group is not None and not seq.tokens:
            if not group.allocate_rows(self._manager):
                return []
            self.query_tokens += seq.num_prompt_tokens if seq.preemptions == 0 else 0
            return self._register(group)
        scores = seq.scores_prompt
        cached = self._manager.allocate(
            seq.seq_id,
            seq.tokens,
            request.cache_salt,
            spare_blocks=0 if group is None else group.spare_blocks(self._manager.block_size),
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
        return self._register(group)

    def _waits_for_a_prefix(self, seq: Sequence) -> bool:
        """A running sequence is computing at least a block of this one's beginning right now, and nobody has it yet.

        The wait is short: it ends when the shared part is computed, and the leader, being admitted, always proceeds.
        """
        if not self._manager.caches_prefixes or seq.scores_prompt:
            return False
        coming = 0
        for other in self._running:
            if other.num_uncomputed > 1:  # one token of prefill is not worth a wait
                shared = other.num_shared_tokens(seq)
                coming = max(coming, shared if shared > other.num_computed else 0)
        if coming < self._manager.block_size:
            return False
        return coming - self._manager.cached_prefix(seq.tokens, seq.request.cache_salt) >= self._manager.block_size

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

    def _only_scores(self, seq: Sequence, result: Sampled) -> bool:
        """Keep the log probabilities of a prompt. True when the step chose no token behind it."""
        seq.prompt_logprobs += result.prompt_logprobs
        self._spread_when_computed(seq)
        return seq.computes_only or seq.num_uncomputed > 0

    def _spread_when_computed(self, leader: Sequence) -> None:
        """The leader's prompt is there: its rows run in its place."""
        if leader.computes_only and not leader.num_uncomputed:
            assert leader.group is not None
            place = self._running.index(leader)
            leader.group.spread(self._manager)
            self._running[place : place + 1] = self._register(leader.group)

    def _register(self, group: SequenceGroup) -> list[Sequence]:
        """The group's live rows can be found by their ids from here on."""
        self._by_id |= {row.seq_id: row for row in group.rows}
        return list(group.rows)

    def _append(self, seq: Sequence, result: Sampled) -> TokenDelta:
        """One more token of a request with one row, and perhaps its end."""
        tokens, token = seq.tokens, result.token_id
        if seq.grammar is not None and (error := _move_on(seq.grammar, result)) is not None:
            self._drop(seq)
            return TokenDelta(seq.seq_id, error=error)
        tokens.append(token)
        made = len(tokens) - seq.num_prompt_tokens
        reason: FinishReason | None = None
        if made >= seq.max_tokens or token in seq.stop_token_ids or seq.grammar is not None:
            reason = self._end_reason(seq, token, made)
            if reason is not None:
                self._finish(seq)
        delta = TokenDelta(seq.seq_id, (token,), seq.first_cached if made == 1 else None, reason)
        if seq.extras is None:
            return delta
        return delta._replace(
            logprobs=None if result.logprob is None else (result.logprob,),
            prompt_logprobs=seq.all_prompt_logprobs() if made == 1 else None,
        )

    def _append_sample(self, row: Sequence, result: Sampled, group: SequenceGroup) -> list[TokenDelta]:
        """One more token of one of several samples. The last row to end ends the request; one that fails, too."""
        if row.grammar is not None and (error := _move_on(row.grammar, result)) is not None:
            self._drop(group.leader)
            return [TokenDelta(row.request.request_id, error=error)]
        row.tokens.append(result.token_id)
        logprobs = () if result.logprob is None else (result.logprob,)
        row.logprob += sum(one.logprob for one in logprobs)
        reason = self._end_reason(row, result.token_id, row.num_output_tokens)
        if reason is not FinishReason.STOP and group.came_to_stop(row):
            reason = FinishReason.STOP
        if group.withholds:
            row.logprobs += logprobs
        best: list[TokenDelta] = []
        if reason is not None:
            self._running.remove(row)
            del self._by_id[row.seq_id]
            best = group.end_row(row, reason, self._manager)
            if not group.rows:
                self._finish(group.leader)
        if group.withholds:
            return best
        delta = TokenDelta(
            request_id=row.request.request_id,
            token_ids=(result.token_id,),
            cached_tokens=row.first_cached if row.num_output_tokens == 1 else None,
            finish_reason=reason,
            choice=row.index,
            more=reason is not None and bool(group.rows),
            logprobs=logprobs or None,
            prompt_logprobs=group.prompt_logprobs(),
        )
        return [delta]

    def _end_reason(self, seq: Sequence, token: int, made: int) -> FinishReason | None:
        if token in seq.stop_token_ids or (seq.grammar is not None and seq.grammar.is_finished):
            return FinishReason.STOP
        return FinishReason.LENGTH if made >= seq.max_tokens else None

    def _advance(self, group: SequenceGroup) -> list[TokenDelta]:
        place = self._running.index(group.rows[0])
        self._leave_running(group)
        answers = group.advance(self._manager)
        if answers:
            group.release(self._manager)
            self._finish(group.leader)
        else:
            self._running[place:place] = self._register(group)
        return answers

    def _cached_prefix(self, seq: Sequence) -> int:
        """How much of it the cache would save now."""
        return 0 if seq.scores_prompt else self._manager.cached_prefix(seq.tokens, seq.request.cache_salt)

    def _leave_running(self, group: SequenceGroup) -> None:
        members = {group.leader.seq_id, *(row.seq_id for row in group.rows)}
        self._running = [seq for seq in self._running if seq.seq_id not in members]
        for row in group.rows:
            self._by_id.pop(row.seq_id, None)

    def _drop(self, seq: Sequence) -> None:
        """A plain sequence, or the leader of a group, which goes with all its rows."""
        if seq.group is not None:
            self._leave_running(seq.group)
            seq.group.release(self._manager)
        self._finish(seq)

    def _finish(self, seq: Sequence) -> None:
        """A plain sequence, or the leader of a group whose rows are gone."""
        if seq.status is SequenceStatus.RUNNING:
            self._running.remove(seq)
        self._manager.free(seq.seq_id)
        seq.status = SequenceStatus.FINISHED
        del self._by_id[seq.seq_id]


def _move_on(grammar: GrammarProgress, result: Sampled) -> KvrayError | None:
    """By the token that was chosen; the error when the answer cannot go on."""
    if result.error is not None:
        return result.error
    try:
        grammar.accept(result.token_id)
    except KvrayError as error:
        return error
    return None


def _seats(seq: Sequence) -> int:
    return 1 if seq.group is None else seq.group.seats_of(seq)
