"""DrivenEngine: an engine without a thread, stepped by the experiment itself, which so sees the state after every step.

Owns: asking one prompt after the other, running many at once, and what was counted on the way.
Does not: build engines (lab_engines) or judge.
Invariants: counts are the engine's own (StepStats and the deltas); a request that ends in an error ends the experiment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from worker.engine import Engine
from worker.frame import EngineCommand
from worker.step_stats import EngineTotals, StepStats

GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Answered(NamedTuple):
    """One request that had the engine for itself. first_s: the steps up to its first token; the others are decoding."""

    prompt_tokens: int
    cached_tokens: int
    tokens: tuple[int, ...]
    first_s: float
    decode_s: float

    @property
    def computed_tokens(self) -> int:
        """Of the prompt."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(slots=True)
class RunRecord:
    """Many requests at once. in_use, running: after each step.  choices: the answers of each request."""

    seconds: float = 0.0
    in_use: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    choices: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0

    @property
    def steps(self) -> int:
        return len(self.in_use)


class DrivenEngine:
    """`seconds` of a step are those of the engine's clock: real or virtual."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._asked = 0

    @property
    def totals(self) -> EngineTotals:
        return self.engine.last_step.totals

    def ask(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY, salt: str = "") -> Answered:
        """Run one request to its end. One choice, no group."""
        self._asked += 1
        name = f"ask{self._asked}"
        self._add(
            [GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, cache_salt=salt)]
        )
        tokens: list[int] = []
        cached, first_s, decode_s = 0, 0.0, 0.0
        while not self.engine.idle:  # a refused request is no work, but has an answer
            deltas = self.engine.step().deltas
            if tokens:
                decode_s += self.engine.last_step.seconds
            else:
                first_s += self.engine.last_step.seconds
            for delta in deltas:
                if delta.error is not None:
                    raise delta.error
                cached = cached if delta.cached_tokens is None else delta.cached_tokens
                tokens += delta.token_ids
        return Answered(len(prompt), cached, tuple(tokens), first_s, decode_s)

    def run(
        self, requests: Sequence[GenerationRequest], on_step: Callable[[StepStats], None] = lambda _: None
    ) -> RunRecord:
        """All of them arrive at once; runs until the last one has ended."""
        record = RunRecord()
        before = self.totals
        self._add(requests)
        while not self.engine.idle:  # a refused request is no work, but has an answer
            for delta in self.engine.step().deltas:
                if delta.error is not None:
                    raise delta.error
                record.choices.setdefault(delta.request_id, {}).setdefault(delta.choice, []).extend(delta.token_ids)
                if delta.cached_tokens is not None:
                    record.cached_tokens[delta.request_id] = delta.cached_tokens
            stats = self.engine.last_step
            record.seconds += stats.seconds
            record.in_use.append(stats.blocks.in_use)
            record.running.append(stats.running)
            on_step(stats)
        record.prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        record.prefill_tokens = self.totals.prefill_tokens - before.prefill_tokens
        record.preemptions = self.totals.preemptions - before.preemptions
        return record

    def _add(self, requests: Sequence[GenerationRequest]) -> None:
        self.engine.execute([EngineCommand(add=request) for request in requests])
