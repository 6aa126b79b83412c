"""The same requests on the real model within one budget, admitted by each policy: tokens per second.

The model computes every answer with the same paged kernel, so what differs is how many requests run at once, which is
the gain in storage. Growing by copy pays for its copies as well, on tensors of the same size: the gain in time.

Owns: the engine as an Executor of memory_drive, and one timed run per policy.
Does not: count waste (memory_counts).
Invariants: the pool is the engine's own; the paged run has no gate in front, the engine admits and preempts by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.config import CacheConfig
from cluster.core.hashing import RouteScheme
from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from cluster.lab.driven_engine import DrivenEngine
from cluster.lab.lab_engines import ModelEngines
from cluster.lab.memory_counts import BLOCK_SIZE, GROW_ONE, PAGED, RESERVE_MAX, RESERVE_OWN, policies
from cluster.lab.memory_drive import drive
from cluster.lab.memory_policy import MemoryPolicy
from cluster.lab.mixed_requests import MixedRequest
from worker.engine_assembly import build_manager
from worker.frame import EngineCommand
from worker.kvcache.block_manager import BlockManager
from worker.runner import ModelFacts

_FIRST_ID = 4  # behind the special tokens of small vocabularies


@dataclass(frozen=True, slots=True)
class SpeedRun:
    """copy_s, copied_bytes: of growing by copy."""

    tokens: int
    engine_s: float
    mean_running: float
    preemptions: int
    copy_s: float = 0.0
    copied_bytes: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / (self.engine_s + self.copy_s)


class EngineExecutor:
    """`seconds`: of the steps so far."""

    def __init__(self, engine: DrivenEngine, seed: int, vocab_size: int) -> None:
        self._engine = engine.engine
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self._runs = 0
        self._names: dict[str, str] = {}
        self.seconds = 0.0

    def request(self, mixed: MixedRequest, name: str) -> GenerationRequest:
        prompt = tuple(self._rng.randrange(_FIRST_ID, self._vocab_size) for _ in range(mixed.prompt_tokens))
        sampling = SamplingParams(temperature=0.0, max_tokens=mixed.answer_tokens, ignore_eos=True)
        return GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)

    def add(self, mixed: MixedRequest) -> None:
        self._runs += 1
        name = f"{mixed.name}-{self._runs}"  # a resumed request is a new one to the engine
        self._names[name] = mixed.name
        self._engine.execute([EngineCommand(add=self.request(mixed, name))])

    def cancel(self, name: str) -> None:
        self._engine.execute([EngineCommand(cancel=run) for run, mixed in self._names.items() if mixed == name])

    def step(self) -> dict[str, int]:
        deltas = self._engine.step().deltas
        self.seconds += self._engine.last_step.seconds
        given: dict[str, int] = {}
        for delta in deltas:
            if delta.error is not None:
                raise delta.error
            if delta.token_ids:
                name = self._names[delta.request_id]
                given[name] = given.get(name, 0) + len(delta.token_ids)
        return given


def measure_speed(
    engines: ModelEngines, requests: Sequence[MixedRequest], budget: int, seed: int, done: Callable[[str], None]
) -> dict[str, SpeedRun]:
    """`done` hears the name of each run when it ends."""
    from cluster.lab.copied_cache import CopiedCache  # imports torch

    runs: dict[str, SpeedRun] = {}
    copied = CopiedCache(budget, engines.facts)
    gates: dict[str, MemoryPolicy] = {name: policies()[name](budget) for name in (RESERVE_MAX, RESERVE_OWN)}
    gates[GROW_ONE] = copied
    for name, gate in gates.items():
        runs[name] = _gated(engines, requests, gate, seed)
        done(name)
    runs[GROW_ONE] = replace(runs[GROW_ONE], copy_s=copied.seconds, copied_bytes=copied.copied_bytes)
    runs[PAGED] = _paged(engines, requests, budget // BLOCK_SIZE, seed)
    done(PAGED)
    return runs


def _gated(engines: ModelEngines, requests: Sequence[MixedRequest], gate: MemoryPolicy, seed: int) -> SpeedRun:
    executor = EngineExecutor(engines.engine(prefix_cache="off"), seed, engines.facts.vocab_size)
    record = drive(requests, gate, executor)
    tokens = sum(request.answer_tokens for request in requests)
    return SpeedRun(tokens, executor.seconds, record.mean_running, record.preemptions)


def _paged(engines: ModelEngines, requests: Sequence[MixedRequest], num_blocks: int, seed: int) -> SpeedRun:
    engine = engines.engine(smaller_pool(num_blocks), prefix_cache="off")
    maker = EngineExecutor(engine, seed, engines.facts.vocab_size)
    record = engine.run([maker.request(mixed, mixed.name) for mixed in requests])
    tokens = sum(request.answer_tokens for request in requests)
    running = [count for count in record.running if count]
    return SpeedRun(tokens, record.seconds, sum(running) / len(running), record.preemptions)


def smaller_pool(num_blocks: int) -> Callable[[CacheConfig, ModelFacts, RouteScheme], BlockManager]:
    """A manager that uses only the first blocks of the pool."""

    def make(config: CacheConfig, facts: ModelFacts, scheme: RouteScheme) -> BlockManager:
        assert num_blocks <= facts.num_blocks
        return build_manager(config, replace(facts, num_blocks=num_blocks), scheme)

    return make
