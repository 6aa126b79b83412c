"""Scheduler: which tokens run in the next step, and what a step's result means for each sequence.

One token budget per step is shared by decode rows (one token each, first) and prefill pieces (the rest). Only
uncached tokens cost budget. A waiting sequence is admitted when the blocks of its whole prompt can be reserved, so
two half-loaded prompts can never block each other. One that shares a prefix which is being computed waits until it is
there. When a running sequence needs a block and none is left, the
newest running one is preempted: it keeps its tokens, its computed blocks stay cached, and it waits at the head.

Owns: the waiting queue, the running list, limits, preemption, and why a sequence ends.
Does not: see blocks or tree nodes (block_manager), run models, or know time.
Invariants: budget never exceeded; running is in admission order; a step with work makes progress, because every
request that was let in fits into the pool alone; a refused request leaves no trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from cluster.core.errors import InvalidRequest, Overloaded, RequestTooLong
from cluster.core.request import FinishReason, GenerationRequest, TokenDelta
from worker.batch import Batch, ScheduledSeq
from worker.kvcache.block_manager import BlockManager
from worker.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    max_num_seqs: int
    token_budget: int
    max_queue: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    strict_blocks: bool = False


class Scheduler:
    """Single-threaded: called by the engine between steps."""

    def __init__(self, manager: BlockManager, limits: SchedulerLimits) -> None:
        self._manager = manager
        self._limits = limits
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
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

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises InvalidRequest, RequestTooLong or Overloaded, and then nothing has changed."""
        max_tokens = self._resolve_max_tokens(request)
        if len(self._waiting) >= self._limits.max_queue:
            raise Overloaded(f"the queue is full ({self._limits.max_queue} requests)", retry_after_s=1.0)
        if request.request_id in self._by_id:
            raise InvalidRequest("request_id", f"request {request.request_id} is already running")
        seq = Sequence(request, max_tokens, self._limits.eos_token_ids)
        seq.expected_cached = self._manager.cached_prefix(seq.tokens, request.cache_salt)
        self._by_id[seq.seq_id] = seq
        self._waiting.append(seq)

    def cancel(self, request_id: str) -> bool:
        """End a request in any state and free its blocks. False when it is not here (any more)."""
        seq = self._by_id.get(request_id)
        if seq is None:
            return False
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        self._finish(seq)
        return True

    def schedule(self) -> Batch:
        """The next step's batch; empty only when there is no work."""
        budget = self._limits.token_budget
        chosen: dict[str, int] = {}  # seq id -> tokens this step
        preempted_before = self.num_preemptions
        decoding = [seq for seq in self._running if seq.decoding]
        prefilling = [seq for seq in self._running if not seq.decoding]
        for seq in decoding:
            if budget == 0:
                break
            if seq.status is SequenceStatus.RUNNING and self._make_room(seq, chosen):
                chosen[seq.seq_id] = 1
                budget = self._limits.token_budget - len(chosen)  # a victim gives its token back
        for seq in prefilling:
            if seq.status is SequenceStatus.RUNNING and budget > 0:
                chosen[seq.seq_id] = min(seq.num_uncomputed, budget)
                budget -= chosen[seq.seq_id]
        if self.num_preemptions == preempted_before:
            self._admit(chosen, budget)
        seqs = tuple(self._scheduled(self._by_id[seq_id], count) for seq_id, count in chosen.items())
        return Batch(seqs, tuple(self._manager.take_copies()) if seqs else ())

    def complete(self, batch: Batch, sampled: Seq[int]) -> list[TokenDelta]:
        """Book a finished step: KV is there, blocks enter the tree, new tokens are appended, ends are found."""
        deltas: list[TokenDelta] = []
        tokens = iter(sampled)
        for item in batch.seqs:
            seq = self._by_id[item.request_id]
            seq.num_computed = item.end
            prompt_done = item.sample and seq.num_output_tokens == 0
            self._manager.commit(seq.seq_id, seq.tokens, seq.num_computed, tail=prompt_done)
            if item.sample:
                deltas.append(self._append(seq, next(tokens)))
        return deltas

    def _resolve_max_tokens(self, request: GenerationRequest) -> int:
        prompt, limit = len(request.prompt_token_ids), self._limits.max_model_len
        limit = min(limit, self._manager.capacity_tokens)
        if prompt >= limit:
            raise RequestTooLong(
                "prompt", f"the prompt has {prompt} tokens, but at most {limit - 1} fit (limit {limit})", limit=limit
            )
        if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= self._limits.vocab_size:
            raise InvalidRequest(
                "token_ids", f"a token id is outside the vocabulary (0 to {self._limits.vocab_size - 1})"
            )
        asked = request.sampling.max_tokens
        if asked is None:
            return limit - prompt
        if prompt + asked > limit:
            raise RequestTooLong(
                "max_tokens",
                f"prompt ({prompt} tokens) + max_tokens ({asked}) exceeds the limit of {limit} tokens",
                limit=limit,
            )
        return asked

    def _make_room(self, seq: Sequence, chosen: dict[str, int]) -> bool:
        """Slots for the newest token, preempting the newest sequences if needed. False: `seq` itself had to go."""
        while not self._manager.append_token(seq.seq_id, seq.num_tokens):
            victim = self._running[-1]
            self._preempt(victim)
            chosen.pop(victim.seq_id, None)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self._manager.free(seq.seq_id)
        seq.status = SequenceStatus.WAITING
        seq.num_computed = 0
        seq.preemptions += 1
        seq.expected_cached = self._manager.cached_prefix(seq.tokens, seq.request.cache_salt)
        self.num_preemptions += 1
        self._waiting.appendleft(seq)

    def _admit(self, chosen: dict[str, int], budget: int) -> None:
        held: list[Sequence] = []
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_num_seqs:
            seq = self._waiting[0]
            if self._waits_for_a_prefix(seq):
                held.append(self._waiting.popleft())
                continue
            cached = self._manager.allocate(seq.seq_id, seq.tokens, seq.request.cache_salt)
            if cached is None and not self._running and self._manager.drop_pins():
                continue  # with nothing running only pins can be in the way
            if cached is None:
                break
            self._waiting.popleft()
            seq.status = SequenceStatus.RUNNING
            seq.num_computed = cached
            if seq.first_cached is None:  # a resumed sequence hits its own blocks, which is not a cache hit
                seq.first_cached = cached
                self.query_tokens += seq.num_prompt_tokens
                self.hit_tokens += cached
            self._running.append(seq)
            chosen[seq.seq_id] = min(seq.num_uncomputed, budget)
            budget -= chosen[seq.seq_id]
        self._waiting.extendleft(reversed(held))

    def _waits_for_a_prefix(self, seq: Sequence) -> bool:
        """A running sequence is computing at least a block of this one's beginning right now, and nobody has it yet.

        The wait is short: it ends when the shared part is computed, and the leader, being admitted, always proceeds.
        """
        leaders = [
            other.num_shared_tokens(seq)
            for other in self._running
            if not other.decoding and other.num_shared_tokens(seq) > other.num_computed
        ]
        if not leaders or not self._manager.caches_prefixes:
            return False
        return (
            max(leaders) - self._manager.cached_prefix(seq.tokens, seq.request.cache_salt) >= self._manager.block_size
        )

    def _scheduled(self, seq: Sequence, count: int) -> ScheduledSeq:
        start, end = seq.num_computed, seq.num_computed + count
        if self._limits.strict_blocks:
            self._manager.check_writable(seq.seq_id, start, end)
        return ScheduledSeq(
            request_id=seq.seq_id,
            token_ids=tuple(seq.tokens[start:end]),
            start=start,
            block_ids=tuple(self._manager.get_block_ids(seq.seq_id)),
            sample=end == seq.num_tokens,
            sampling=seq.request.sampling,
        )

    def _append(self, seq: Sequence, token: int) -> TokenDelta:
        first = seq.num_output_tokens == 0
        seq.tokens.append(token)
        reason: FinishReason | None = None
        if token in seq.stop_token_ids:
            reason = FinishReason.STOP
        elif seq.num_output_tokens >= seq.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(seq)
        cached = seq.first_cached if first else None
        return TokenDelta(request_id=seq.seq_id, token_ids=(token,), cached_tokens=cached, finish_reason=reason)

    def _finish(self, seq: Sequence) -> None:
        if seq.status is SequenceStatus.RUNNING:
            self._running.remove(seq)
            self._manager.free(seq.seq_id)
        seq.status = SequenceStatus.FINISHED
        del self._by_id[seq.seq_id]
