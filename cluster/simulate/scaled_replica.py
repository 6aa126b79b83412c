"""ScaledReplica: one replica of a simulated fleet, fast enough for whole traces on many replicas.

The waiting queue, holds, admission, preemption, block manager, radix tree and cache events are the engine's own; they
work on one id per block instead of one per token. What is written anew here is the division of a step's budget, which
counts exact tokens, and decoding, where nothing but a counter changes between two events:

    decode steps so far   0 ............ 212 ......... 700
    A                     |-- decodes ----| ends
    B                     |-- decodes --------| takes a block      one heap of such events per replica

Owns: when steps begin and end, exact progress, and what happened in each.
Does not: choose replicas (fleet_simulation), time steps (cluster.core.step_time) or keep statistics.
Invariants: as the engine's: the budget is never exceeded, decode rows come first, pieces before admissions; a stretch
of decode steps ends where something could change, or at the first step boundary after a request came (`interrupt`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cluster.core.events import CacheEvent
from cluster.core.hashing import RouteScheme
from cluster.core.replica import ReplicaLoad, WorkerId
from cluster.core.step_time import StepShape, StepTimeModel
from cluster.simulate.mooncake_trace import TRACE_BLOCK, TraceRequest
from cluster.simulate.scaled_sequence import ScaledSequence
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.radix_tree import RadixTree
from worker.request_gate import SchedulerLimits
from worker.scheduling.admission import Admission
from worker.scheduling.live_sequences import LiveSequences
from worker.scheduling.preemption import Preemption
from worker.scheduling.prefix_holds import PrefixHolds
from worker.scheduling.waiting_queue import WaitingQueue
from worker.sequence import SequenceStatus
from worker.step_budget import StepBudget

SCHEME = RouteScheme(tokenizer_revision="trace", model_revision="trace", chunk_tokens=1)
FIRST_OWN_ID = 1 << 31  # hash ids of traces are below


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    kv_tokens: int
    step_time: StepTimeModel
    token_budget: int = 2048
    max_num_seqs: int = 64
    prefix_first: bool = True
    ageing_s: float = 2.0
    hold_back: bool = True
    watermark: float = 0.01
    block: int = TRACE_BLOCK

    def slowed(self, times: float) -> ReplicaSettings:
        return replace(self, step_time=self.step_time.slowed(times))


class StepEnd(NamedTuple):
    """first: request ids with their first token, and the cached tokens of each.  done: those with their last one.

    gap_s: how long each decode row waited per token, on average; num_gaps: tokens it is true of.
    """

    first: list[tuple[str, int]]
    done: list[str]
    events: list[CacheEvent]
    gap_s: float
    num_gaps: int


@dataclass(slots=True)
class _Running:
    """The steps under way. `steps` > 1 only without pieces: each takes `growth_s` more than the one before."""

    began_s: float
    steps: int
    first_s: float
    growth_s: float
    pieces: list[tuple[ScaledSequence, int]] = field(default_factory=list)

    def seconds(self, steps: int) -> float:
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)


class ScaledReplica:
    """Times are those of the fleet's clock: `begin` and `interrupt` answer with when the next step end is due."""

    def __init__(self, worker_id: WorkerId, settings: ReplicaSettings, router_id: str) -> None:
        self.worker_id = worker_id
        self.settings = settings
        self.step_time = settings.step_time  # what steps take; heartbeats tell that of the settings
        self._told_step_time = tuple(settings.step_time.to_wire())
        self._router_id = router_id
        num_blocks = settings.kv_tokens // settings.block
        pool = BlockPool(num_blocks)
        tree = RadixTree(pool, 1, 1, partial=False)  # an id has no parts
        self.manager = manager = BlockManager(pool, tree, 1, SCHEME)
        limits = SchedulerLimits(
            max_num_seqs=settings.max_num_seqs,
            token_budget=settings.token_budget,
            max_queue=1 << 30,
            max_model_len=num_blocks,
            vocab_size=1 << 32,
            eos_token_ids=(),
            prefix_first=settings.prefix_first,
            ageing_s=settings.ageing_s,
            hold_back=settings.hold_back,
            watermark=settings.watermark,
        )
        self._live = LiveSequences(manager)
        self._queue = WaitingQueue(
            lambda seq: manager.cached_prefix(seq.lookup),
            lambda: manager.cache_changes,
            settings.ageing_s,
            prefix_first=settings.prefix_first,
        )
        self._holds = PrefixHolds(manager, self._queue, settings.ageing_s, enabled=settings.hold_back)
        self._preemption = Preemption(manager, self._live, self._queue)
        self._admission = Admission(manager, limits, self._live, self._queue, self._holds, self._preemption)
        self._no_budget = StepBudget(0)
        self._fresh = itertools.count(FIRST_OWN_ID)
        self._prefilling: list[ScaledSequence] = []
        self._agenda: list[tuple[int, int, ScaledSequence, int, bool]] = []  # what is due at which decode step
        self._serials = itertools.count()
        self._arrivals = 0
        self._decode_steps = 0
        self._num_decoding = 0
        self._decode_context = 0
        self._step: _Running | None = None
        self.busy_s = self.loaded_s = 0.0
        self.steps = 0
        self.prefill_tokens = 0

    @property
    def idle(self) -> bool:
        return self._step is None

    @property
    def num_live(self) -> int:
        """Requests that are not finished."""
        return len(self._live)

    @property
    def preemptions(self) -> int:
        return self._preemption.count

    def add(self, request: TraceRequest, now: float) -> bool:
        """False: it can never fit."""
        if request.prompt_tokens + request.output_tokens > self.manager.capacity_tokens * self.settings.block:
            return False
        seq = ScaledSequence(request, self._router_id, lambda: next(self._fresh))
        seq.arrival, seq.arrived_at = self._arrivals, now
        self._arrivals += 1
        self._live.add(seq)
        self._queue.add(seq)
        return True

    def live_requests(self) -> list[str]:
        return [seq.seq_id for seq in self._live]

    def begin(self, now: float) -> float | None:
        """Plan the next step, or a stretch of decode steps. None: there is nothing to do."""
        self._keep_agenda()
        pieces = self._pieces(now)
        decoding, times = self._num_decoding, self.step_time
        if not pieces and not decoding:
            assert not len(self._live), "a replica has requests, but takes no step"
            return None
        tokens, attended = 0, 0.0
        for seq, count in pieces:
            tokens += count
            attended += count * (seq.done + (count + 1) / 2)
        first_s = times.seconds(StepShape(tokens, attended, decoding, self._decode_context))
        steps = 1 if pieces else max(self._agenda[0][0] - self._decode_steps, 1)
        self._step = _Running(now, steps, first_s, times.per_decode_context * decoding, pieces)
        return now + self._step.seconds(steps)

    def interrupt(self, now: float) -> float | None:
        """A request came: end a stretch with the step that is running at `now`. None: its end stays as it was."""
        step = self._step
        if step is None or step.steps == 1:
            return None
        elapsed = now - step.began_s
        half, first = step.growth_s / 2, step.first_s - step.growth_s / 2
        exact = elapsed / first if half <= 0.0 else (math.sqrt(first * first + 4 * half * elapsed) - first) / (2 * half)
        steps = min(max(math.ceil(exact), 1), step.steps)
        if step.seconds(steps) < elapsed and steps < step.steps:
            steps += 1  # rounding
        if steps == step.steps:
            return None
        step.steps = steps
        return step.began_s + step.seconds(steps)

    def end(self, now: float) -> StepEnd:
        """The planned steps are over."""
        step, decoding = self._step, self._num_decoding
        assert step is not None, "no step runs"
        self._step = None
        took = step.seconds(step.steps)
        self.busy_s += took
        self.steps += step.steps
        self._decode_steps += step.steps
        self._decode_context += step.steps * decoding
        first: list[tuple[str, int]] = []
        done: list[str] = []
        if step.pieces or len(self._queue):
            self.loaded_s += took
        for seq, count in step.pieces:
            self._advance(seq, count, first, done)
        self._finish_due(done)
        return StepEnd(first, done, self.manager.take_events(), took / step.steps, decoding * step.steps)

    def load(self) -> ReplicaLoad:
        """The heartbeat."""
        counts = self.manager.counts()
        uncached = self._queue.uncached_tokens.get(self._router_id, 0)
        uncached += sum(seq.num_uncomputed for seq in self._prefilling)
        return ReplicaLoad(
            waiting=len(self._queue),
            held=self._queue.num_held,
            running=len(self._live.running),
            uncached_tokens={self._router_id: uncached},
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            in_use_blocks=counts.in_use,
            total_blocks=counts.total,
            step_time_model=self._told_step_time,
            loaded_s=self.loaded_s,
        )

    def _pieces(self, now: float) -> list[tuple[ScaledSequence, int]]:
        """Which tokens are prefilled in the next step."""
        left = self.settings.token_budget - self._num_decoding
        pieces: list[tuple[ScaledSequence, int]] = []
        for seq in self._prefilling:
            if left <= 0:
                break
            count = min(left, seq.total - seq.done)
            pieces.append((seq, count))
            left -= count
        if not len(self._queue):
            return pieces
        self._holds.release(now)
        self._queue.refresh()
        while left > 0:
            waiting = self._queue.first(now)
            if waiting is None:
                break
            if not self._admission.admit(waiting, self._no_budget, self._prefilling, now):  # type: ignore[arg-type]
                break
            if waiting.status is SequenceStatus.RUNNING:
                assert isinstance(waiting, ScaledSequence)
                waiting.done = waiting.num_computed * self.settings.block
                count = min(left, waiting.total - waiting.done)
                pieces.append((waiting, count))
                left -= count
        return pieces

    def _advance(self, seq: ScaledSequence, count: int, first: list[tuple[str, int]], done: list[str]) -> None:
        seq.done += count
        self.prefill_tokens += count
        blocks = seq.done // seq.block
        if blocks > seq.num_computed:
            seq.num_computed = blocks
            self.manager.commit(seq.seq_id, seq.tokens, blocks)
        if seq.done < seq.total:
            return
        self._prefilling.remove(seq)
        seq.generated += 1
        if seq.generated == 1:
            first.append((seq.seq_id, (seq.first_cached or 0) * seq.block))
        left = seq.output_tokens - seq.generated
        if left <= 0:
            self._live.finish(seq)
            done.append(seq.seq_id)
            return
        seq.decoding_since = self._decode_steps
        self._num_decoding += 1
        self._decode_context += seq.total + 1
        self._plan(seq, left, ends=True)
        until_full = -seq.total % seq.block
        if until_full < left:
            self._plan(seq, until_full, ends=False)

    def _plan(self, seq: ScaledSequence, steps: int, *, ends: bool) -> None:
        heapq.heappush(self._agenda, (self._decode_steps + steps, next(self._serials), seq, seq.preemptions, ends))

    def _finish_due(self, done: list[str]) -> None:
        """Rows that have their last token leave. Those that only need a block stay in the agenda."""
        kept: list[tuple[int, int, ScaledSequence, int, bool]] = []
        while self._agenda and self._agenda[0][0] <= self._decode_steps:
            entry = heapq.heappop(self._agenda)
            _, _, seq, preemptions, ends = entry
            if seq.status is not SequenceStatus.RUNNING or seq.preemptions != preemptions:
                continue
            if ends:
                self._stop_decoding(seq)
                self._live.finish(seq)
                done.append(seq.seq_id)
            else:
                kept.append(entry)
        for entry in kept:
            heapq.heappush(self._agenda, entry)

    def _keep_agenda(self) -> None:
        """Rows whose block is full: it enters the cache, and they get another one, or somebody has to go."""
        while self._agenda and self._agenda[0][0] <= self._decode_steps:
            _, _, seq, preemptions, _ = heapq.heappop(self._agenda)
            if seq.status is not SequenceStatus.RUNNING or seq.preemptions != preemptions:
                continue
            seq.num_computed = len(seq.tokens)
            self.manager.commit(seq.seq_id, seq.tokens, seq.num_computed)
            seq.tokens.append(next(self._fresh))
            before = self._preemption.count
            self._preemption.make_room(seq, self._no_budget)
            if self._preemption.count > before:
                self._take_back()
            if seq.status is SequenceStatus.RUNNING:
                self._plan(seq, seq.block, ends=False)

    def _take_back(self) -> None:
        """Somebody was preempted: whoever is not running any more neither decodes nor prefills."""
        self._prefilling = [seq for seq in self._prefilling if seq.status is SequenceStatus.RUNNING]
        for seq in self._queue:
            assert isinstance(seq, ScaledSequence)
            if seq.preemptions and seq.generated and seq.decoding_since >= 0:
                if seq.done >= seq.total:
                    self._stop_decoding(seq)
                    seq.generated += self._decode_steps - seq.decoding_since
                    seq.total += self._decode_steps - seq.decoding_since + 1
                seq.decoding_since = -1
            if seq.preemptions:
                seq.done = 0

    def _stop_decoding(self, seq: ScaledSequence) -> None:
        self._num_decoding -= 1
        self._decode_context -= seq.total + 1 + self._decode_steps - seq.decoding_since
