"""Engine: the synchronous step loop's body, schedule -> run -> postprocess.

A request with a constraint waits aside until its grammar is compiled; all others go on meanwhile.

Owns: turning commands into scheduler calls, one step, deadlines, and the statistics of the step.
Does not: know processes, threads, Ray or Redis (engine_loop, engine_port, deployment) or sample (runner).
Invariants: a frame is produced for every command batch or step; blocks are freed only after the step that used
them; a request ends with exactly one last delta.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from cluster.core.errors import DeadlineExceeded, InvalidRequest, KvrayError, Overloaded
from cluster.core.replica import ReplicaLoad
from cluster.core.request import FinishReason, GenerationRequest, TokenDelta
from worker.deadlines import Deadlines
from worker.frame import EngineCommand, EngineFrame, EngineMode
from worker.grammar_port import GrammarPort
from worker.grammar_queue import GrammarQueue
from worker.kvcache.block_manager import BlockManager
from worker.runner import Runner
from worker.scheduler import Scheduler
from worker.step_meter import StepMeter
from worker.step_stats import EngineTotals, StepStats


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
        self._deadlines = Deadlines()
        self._early: list[TokenDelta] = []
        self._meter = StepMeter()
        self._finished = self._expired = self._refused = 0
        self.last_step = self._collect()

    @property
    def has_work(self) -> bool:
        """Some request is not answered yet."""
        return self._scheduler.has_work or len(self._constrained) > 0

    @property
    def idle(self) -> bool:
        """A step would do nothing: there is no work, it is paused, or all of it waits for grammars."""
        if self._early or self._constrained.has_ready:
            return False
        if (deadline := self._deadlines.next()) is not None and deadline <= self._clock():
            return False
        return not self._scheduler.has_work or self._scheduler.paused

    @property
    def next_deadline(self) -> float | None:
        """When an idle engine has to step although nobody sends it anything, in the clock's seconds."""
        return self._deadlines.next()

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
            if command.mode is not None:
                self._change_mode(command.mode)

    def reset_cache(self) -> None:
        self._manager.reset_cache()

    def audit(self) -> Iterator[None]:
        """Check all KV bookkeeping in short pieces; AssertionError says what is wrong. Drop it before doing more."""
        return self._manager.audit()

    def step(self) -> EngineFrame:
        """Run one batch (none when there is no work) and report what happened since the last frame."""
        self._expire()
        self._admit_compiled()
        deltas, self._early = self._early, []
        batch = self._scheduler.schedule()
        if batch.seqs:
            started = self._clock()
            sampled = self._runner.run(batch)
            new = self._scheduler.complete(batch, sampled)
            self._prepare_masks()
            took, generated = self._clock() - started, sum(len(d.token_ids) for d in new)
            self._meter.observe(batch, took, generated, self._scheduler.num_waiting)
            for delta in new:
                if delta.last:
                    self._finished += 1
                    self._deadlines.clear(delta.request_id)
            deltas += new
            self._manager.end_step()
        else:
            self._meter.rest()
        if self._check:
            self._manager.check_invariants()
        self.last_step = self._collect()
        return EngineFrame(tuple(deltas), tuple(self._manager.take_events()), self.last_step.load())

    def _collect(self) -> StepStats:
        """Of the last step and the state after it."""
        scheduler, meter = self._scheduler, self._meter
        uncached = Counter(scheduler.uncached_tokens())
        for request in self._constrained.requests():
            uncached[request.router_id] += len(request.prompt_token_ids)
        return StepStats(
            shape=meter.shape,
            seconds=meter.seconds,
            waiting=scheduler.num_waiting + len(self._constrained),
            held=scheduler.num_held,
            running=scheduler.num_running,
            paused=scheduler.paused,
            draining=scheduler.draining,
            uncached_tokens=uncached,
            blocks=self._manager.counts(),
            totals=EngineTotals(
                steps=meter.steps,
                query_tokens=scheduler.query_tokens,
                hit_tokens=scheduler.hit_tokens,
                prefill_tokens=meter.prefill_tokens,
                generated_tokens=meter.generated_tokens,
                finished_requests=self._finished,
                expired_requests=self._expired,
                refused_requests=self._refused,
                preemptions=scheduler.num_preemptions,
                loaded_s=meter.loaded_s,
            ),
            step_time_s=meter.step_time_s,
            prefill_tokens_per_s=meter.prefill_tokens_per_s,
            step_time_model=meter.step_time_model(),
        )

    def load(self) -> ReplicaLoad:
        """The state now, which commands may have changed since the last step."""
        return self._collect().load()

    def _add(self, request: GenerationRequest) -> None:
        waiting = self._constrained
        try:
            max_tokens = self._scheduler.check(request, len(waiting), waiting.num_tokens)
            if request.request_id in waiting:
                raise InvalidRequest("request_id", f"request {request.request_id} is already running")
            if request.constraint is None:
                self._scheduler.add(request, max_tokens=max_tokens)
            else:
                waiting.add(request)
        except KvrayError as error:
            self._refuse(request, error)
            return
        if request.timeout_s is not None:
            self._deadlines.set(request.request_id, self._clock() + request.timeout_s)

    def _refuse(self, request: GenerationRequest, error: KvrayError) -> None:
        self._refused += 1
        if isinstance(error, Overloaded):
            error = Overloaded(error.message, retry_after_s=self._seconds_until_room())
        self._early.append(TokenDelta(request_id=request.request_id, error=error))

    def _seconds_until_room(self) -> float:
        """How long what waits now will take, within 1 s and 1 min: when it is worth asking again."""
        tokens = sum(self._scheduler.uncached_tokens().values())
        rate = self._meter.prefill_tokens_per_s
        return min(max(tokens / rate, 1.0), 60.0) if rate else 1.0

    def _cancel(self, request_id: str) -> bool:
        if not self._constrained.remove(request_id) and not self._scheduler.cancel(request_id):
            return False
        self._deadlines.clear(request_id)
        return True

    def _expire(self) -> None:
        """End what nobody waits for any more, before it costs a step."""
        for request_id in self._deadlines.passed(self._clock()):
            if self._cancel(request_id):
                self._expired += 1
                late = DeadlineExceeded("the request's deadline passed before its answer was complete")
                self._early.append(TokenDelta(request_id=request_id, error=late))

    def _change_mode(self, mode: EngineMode) -> None:
        self._scheduler.paused = mode is EngineMode.PAUSE
        if mode is not EngineMode.PAUSE:
            self._scheduler.draining = mode is EngineMode.DRAIN

    def _admit_compiled(self) -> None:
        """Requests whose grammar has come go to the scheduler, those whose grammar failed end."""
        for request, outcome in self._constrained.take_ready():
            try:
                if isinstance(outcome, KvrayError):
                    raise outcome
                self._scheduler.add(request, outcome)
            except KvrayError as error:
                self._deadlines.clear(request.request_id)
                self._refuse(request, error)

    def _prepare_masks(self) -> None:
        """Of the coming step, beside what is done until then."""
        if self._grammars is not None and (states := self._scheduler.grammars()):
            self._grammars.prepare(states)
