"""Engine: the synchronous step loop's body, schedule -> run -> postprocess.

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
from cluster.core.request import FinishReason, TokenDelta
from worker.frame import EngineCommand, EngineFrame
from worker.kvcache.block_manager import BlockManager
from worker.runner import Runner
from worker.scheduler import Scheduler

_SMOOTHING = 0.2


class Engine:
    """`clock` gives seconds; `check_invariants` verifies all KV bookkeeping after every step (tests)."""

    def __init__(
        self,
        runner: Runner,
        manager: BlockManager,
        scheduler: Scheduler,
        clock: Callable[[], float],
        check_invariants: bool = False,
    ) -> None:
        self._runner = runner
        self._manager = manager
        self._scheduler = scheduler
        self._clock = clock
        self._check = check_invariants
        self._early: list[TokenDelta] = []
        self._prefill_rate = 0.0
        self._step_time = 0.0
        self._generated = 0
        self._finished = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def execute(self, commands: Sequence[EngineCommand]) -> None:
        """Apply commands between steps. A refused request answers in the next frame."""
        for command in commands:
            if command.add is not None:
                try:
                    self._scheduler.add(command.add)
                except KvrayError as error:
                    self._early.append(TokenDelta(request_id=command.add.request_id, error=error))
            if command.cancel is not None and self._scheduler.cancel(command.cancel):
                self._early.append(TokenDelta(request_id=command.cancel, finish_reason=FinishReason.CANCELLED))

    def reset_cache(self) -> None:
        self._manager.reset_cache()

    def audit(self) -> Iterator[None]:
        """Check all KV bookkeeping in short pieces; AssertionError says what is wrong. Drop it before doing more."""
        return self._manager.audit()

    def step(self) -> EngineFrame:
        """Run one batch (none when there is no work) and report what happened since the last frame."""
        deltas, self._early = self._early, []
        batch = self._scheduler.schedule()
        if batch.seqs:
            started = self._clock()
            sampled = self._runner.run(batch)
            new = self._scheduler.complete(batch, sampled)
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
        counts = self._manager.counts()
        return ReplicaLoad(
            waiting=self._scheduler.num_waiting,
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

    def _measure(self, num_tokens: int, pieces: int, started: float) -> None:
        elapsed = max(self._clock() - started, 1e-9)
        self._step_time = _smooth(self._step_time, elapsed)
        if pieces and num_tokens >= 64:  # small steps say more about overhead than about the prefill rate
            self._prefill_rate = _smooth(self._prefill_rate, num_tokens / elapsed)


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - _SMOOTHING) * old + _SMOOTHING * new
