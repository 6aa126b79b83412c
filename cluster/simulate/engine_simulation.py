"""EngineSimulation: one replica's real engine through a whole trace, in virtual time.

    arrivals with a time <= now -> execute      as a live engine takes its commands between steps
    nothing to do               -> jump to the next arrival
    otherwise                   -> FastForward, or one step

Owns: this loop.
Does not: schedule (worker.scheduler), time steps (virtual_runner) or judge results (sim_report).
Invariants: the same requests and settings give the same result bit for bit; it ends when every request has its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.core.hashing import RouteScheme
from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from cluster.simulate.engine_view import EngineView
from cluster.simulate.fast_forward import FastForward
from cluster.simulate.mooncake_trace import TraceRequest
from cluster.simulate.prompt_tokens import PromptTokens
from cluster.simulate.request_log import RequestLog
from cluster.simulate.sim_settings import SimSettings
from cluster.simulate.virtual_clock import VirtualClock
from cluster.simulate.virtual_runner import VirtualRunner, virtual_facts
from worker.engine_assembly import assemble_engine
from worker.frame import EngineCommand
from worker.kvcache.block_pool import BlockCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """prefill_tokens: computed ones, again after a preemption.  fast_steps: of `steps`, those not taken one by one."""

    log: RequestLog
    virtual_s: float
    busy_s: float
    steps: int
    fast_steps: int
    prefill_tokens: int
    preemptions: int
    blocks: BlockCounts


class EngineSimulation:
    """Runs once. `requests`: in order of arrival. `on_progress`: told how many have arrived.

    `backlog`: whatever their times, requests come as soon as fewer than so many wait: what the replica can do at most.
    """

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        settings: SimSettings,
        on_progress: Callable[[int], None] = lambda _: None,
        *,
        backlog: int | None = None,
    ) -> None:
        config = settings.engine_config()
        self._requests = requests
        self._tokens = PromptTokens(requests, settings.seed)
        self._on_progress = on_progress
        self._clock = VirtualClock()
        self.log = RequestLog()
        self._runner = VirtualRunner(
            virtual_facts(settings.num_blocks, settings.block_size),
            settings.step_time,
            self._clock,
            lambda batch: self.log.begin_step(batch, self._clock.now),
        )
        scheme = RouteScheme(
            tokenizer_revision="virtual", model_revision="virtual", chunk_tokens=config.cache.chunk_tokens
        )
        self.engine = assemble_engine(config, self._runner, scheme, clock=self._clock)
        self._view = view = EngineView(self.engine)
        self._fast_forward = (
            FastForward(view, self._runner, self._clock, self.log, config.token_budget)
            if settings.fast_forward
            else None
        )
        self._backlog = backlog
        self._arrived = 0
        self._preemptions = 0

    def run(self) -> SimResult:
        fast_steps = 0
        while self._arrived < len(self._requests) or self.engine.has_work:
            if not self.engine.has_work:
                self._clock.jump_to(self._next_arrival())
            self._arrive()
            if self._fast_forward is not None and (steps := self._fast_forward.advance(self._next_arrival())):
                fast_steps += steps
            else:
                self._step()
        return SimResult(
            log=self.log,
            virtual_s=self._clock.now,
            busy_s=self._runner.busy_s,
            steps=self._runner.steps,
            fast_steps=fast_steps,
            prefill_tokens=self._runner.prefill_tokens,
            preemptions=self._preemptions,
            blocks=self._view.manager.counts(),
        )

    def _next_arrival(self, num_coming: int = 0) -> float:
        """`num_coming`: requests that have arrived, but are not in the engine yet."""
        if self._arrived == len(self._requests):
            return float("inf")
        if self._backlog is not None:
            return self._clock.now if self._view.num_waiting + num_coming < self._backlog else float("inf")
        return self._requests[self._arrived].arrival_s

    def _arrive(self) -> None:
        commands: list[EngineCommand] = []
        while self._next_arrival(len(commands)) <= self._clock.now:
            request = self._requests[self._arrived]
            self._arrived += 1
            self.log.arrived(request)
            commands.append(EngineCommand(add=self._generation_request(request)))
        if commands:
            self.engine.execute(commands)
            self._on_progress(self._arrived)

    def _step(self) -> None:
        before_s = self._clock.now
        frame = self.engine.step()
        self.log.end_step(frame.deltas, before_s, self._clock.now)
        self._preemptions = frame.load.preemptions
        if self._clock.now == before_s and not frame.deltas and self.engine.has_work:
            assert self._arrived < len(self._requests), "the engine has work, but takes no step"
            self._clock.jump_to(self._next_arrival())

    def _generation_request(self, request: TraceRequest) -> GenerationRequest:
        return GenerationRequest(
            request_id=request.request_id,
            prompt_token_ids=self._tokens.prompt(request),
            sampling=SamplingParams(max_tokens=request.output_tokens, ignore_eos=True),
        )
