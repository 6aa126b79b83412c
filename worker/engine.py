"""Engine: the synchronous step loop's body, schedule -> run -> postprocess.

A request with a constraint waits aside until its grammar is compiled; all others go on meanwhile.

Owns: turning commands into scheduler calls, one step, and the load snapshot.
Does not: know processes, threads, Ray or Redis (engine_loop, engine_port, deployment) or sample (runner).
Invariants: a frame is produced for every command batch or step; blocks are freed only after the step that used
them; a request ends with exactly one last delta.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from cluster.core.errors import KvrayError
from cluster.core.replica import ReplicaLoad
from cluster.core.request import FinishReason, GenerationRequest, TokenDelta
from worker.frame import EngineCommand, EngineFrame
from worker.grammar_port import GrammarPort
from worker.grammar_queue import GrammarQueue
from worker.kvcache.block_manager import BlockManager
from worker.runner import Runner
from worker.scheduler import Scheduler

_SMOOTHING = 0.2


class Engine:
    """`clock` gives seconds; `check_invariants` verifies all KV bookkeeping after every step (tests).

    `grammars`: None for an engine without structured output. The engine closes it.
    """

    def __init__(
        self,
        runner: Runner,
        manager: BlockManager,
        scheduler: Scheduler,
        clock: Callable[[], float],
        check_invariants: bool = False,
        grammars: GrammarPort | None = None,
    ) -> None:
        self._runner = runner
        self._manager = manager
        self._scheduler = scheduler
        self._clock = clock
        self._check = check_invariants
        self._grammars = grammars
        self._constrained = GrammarQueue(grammars)
        self._early: list[TokenDelta] = []
        self._prefill_rate = 0.0
        self._step_time = 0.0
        self._generated = 0
        self._finished = 0

    @property
    def has_work(self) -> bool:
        """Some request is not answered yet."""
        return self._scheduler.has_work or len(self._constrained) > 0

    @property
    def idle(self) -> bool:
        """A step would do nothing: there is no work, or all of it waits for grammars."""
        return not self._scheduler.has_work and not self._constrained.has_ready

    def wake_with(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when a grammar is there for which an idle engine waits."""
        self._constrained.wake_with(wake)

    def warm_up(self) -> None:
        """Begin with what structured output needs, beside the steps."""
        if self._grammars is not None:
            self._grammars.warm_up()

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()

    def execute(self, commands: Sequence[EngineCommand]) -> None:
        """Apply commands between steps. A refused request answers in the next frame."""
        for command in commands:
            if command.add is not None:
                self._add(command.add)
            if command.cancel is not None and self._cancel(command.cancel):
                self._early.append(TokenDelta(request_id=command.cancel, finish_reason=FinishReason.CANCELLED))

    def reset_cache(self) -> None:
        self._manager.reset_cache()

    def audit(self) -> Iterator[None]:
        """Check all KV bookkeeping in short pieces; AssertionError says what is wrong. Drop it before doing more."""
        return self._manager.audit()

    def step(self) -> EngineFrame:
        """Run one batch (none when there is no work) and report what happened since the last frame."""
        self._admit_compiled()
        deltas, self._early = self._early, []
        batch = self._scheduler.schedule()
        if batch.seqs:
            started = self._clock()
            sampled = self._runner.run(batch)
            new = self._scheduler.complete(batch, sampled)
            self._prepare_masks()
            self._measure(batch.num_tokens, sum(not s.sample or len(s.token_ids) > 1 for s in batch.seqs), started)
            self._generated += sum(len(d.token_ids) for d in new)
            self._finished += sum(d.last for d in new)
            deltas += new
            self._manager.end_step()
        if self._check:
            self._manager.check_invariants()
        return EngineFrame(tuple(deltas), tuple(self._manager.take_events()), self.load())

    def load(self) -> ReplicaLoad:
        uncached: dict[str, int] = defaultdict(int)
        for seq in self._scheduler.sequences():
            if seq.uncached_tokens:
                uncached[seq.request.router_id] += seq.uncached_tokens
        for request in self._constrained.requests():
            uncached[request.router_id] += len(request.prompt_token_ids)
        counts = self._manager.counts()
        return ReplicaLoad(
            waiting=self._scheduler.num_waiting + len(self._constrained),
            running=self._scheduler.num_running,
            uncached_tokens=dict(uncached),
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            in_use_blocks=counts.in_use,
            total_blocks=counts.total,
            prefill_tokens_per_s=self._prefill_rate,
            step_time_s=self._step_time,
            query_tokens=self._scheduler.query_tokens,
            hit_tokens=self._scheduler.hit_tokens,
            generated_tokens=self._generated,
            finished_requests=self._finished,
            preemptions=self._scheduler.num_preemptions,
        )

    def _add(self, request: GenerationRequest) -> None:
        try:
            if request.constraint is None:
                self._scheduler.add(request)
            else:
                self._scheduler.check(request, len(self._constrained))  # what is refused anyway needs no grammar
                self._constrained.add(request)
        except KvrayError as error:
            self._early.append(TokenDelta(request_id=request.request_id, error=error))

    def _cancel(self, request_id: str) -> bool:
        return self._constrained.remove(request_id) or self._scheduler.cancel(request_id)

    def _admit_compiled(self) -> None:
        """Requests whose grammar has come go to the scheduler, those whose grammar failed end."""
        for request, outcome in self._constrained.take_ready():
            try:
                if isinstance(outcome, KvrayError):
                    raise outcome
                self._scheduler.add(request, outcome)
            except KvrayError as error:
                self._early.append(TokenDelta(request_id=request.request_id, error=error))

    def _prepare_masks(self) -> None:
        """Of the coming step, beside what is done until then."""
        if self._grammars is not None and (states := self._scheduler.grammars()):
            self._grammars.prepare(states)

    def _measure(self, num_tokens: int, pieces: int, started: float) -> None:
        elapsed = max(self._clock() - started, 1e-9)
        self._step_time = _smooth(self._step_time, elapsed)
        if pieces and num_tokens >= 64:  # small steps say more about overhead than about the prefill rate
            self._prefill_rate = _smooth(self._prefill_rate, num_tokens / elapsed)


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - _SMOOTHING) * old + _SMOOTHING * new
