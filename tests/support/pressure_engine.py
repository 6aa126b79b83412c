"""An engine with a real model that is driven step by step in virtual time, for tests under pressure.

Owns: the engine, what it answered, and what happened.
Does not: make requests (mixed_traffic) or judge answers (tests).
Invariants: the same calls give the same steps; the engine checks its KV bookkeeping after every one of them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mixed_traffic import CONSTRAINTS, Shape
from sampling_engine import Answer
from tokenizers import Tokenizer

from cluster.config import CacheConfig, EngineConfig
from cluster.core.errors import KvrayError
from cluster.core.hashing import RouteScheme
from cluster.core.request import FinishReason, GenerationRequest, TokenDelta
from worker.engine import Engine
from worker.engine_assembly import assemble_engine
from worker.frame import EngineCommand
from worker.grammar.grammar_service import GrammarService
from worker.grammar.vocabulary import Vocabulary
from worker.model_runner import ModelRunner
from worker.sequence import SequenceStatus
from worker.step_stats import StepStats

STEP_S = 0.05  # of virtual time


@dataclass(slots=True)
class Happened:
    """most_in_use: blocks.  held: requests that waited for a prefix, summed over the steps."""

    most_in_use: int = 0
    held: int = 0
    running: int = 0


@dataclass(slots=True)
class PressureEngine:
    """answers: by request and choice.  last: of requests that ended, however that was."""

    engine: Engine
    grammars: GrammarService
    answers: dict[str, dict[int, Answer]] = field(default_factory=dict)
    last: dict[str, TokenDelta] = field(default_factory=dict)
    errors: dict[str, KvrayError] = field(default_factory=dict)
    happened: Happened = field(default_factory=Happened)
    now: float = 0.0

    @property
    def stats(self) -> StepStats:
        return self.engine.last_step

    def add(self, requests: Iterable[GenerationRequest]) -> None:
        commands = []
        for request in requests:
            self.answers[request.request_id] = {}
            commands.append(EngineCommand(add=request))
        self.engine.execute(commands)

    def cancel(self, names: Iterable[str]) -> None:
        self.engine.execute([EngineCommand(cancel=name) for name in names])

    def step(self) -> None:
        self.now += STEP_S
        for delta in self.engine.step().deltas:
            assert delta.request_id not in self.last, "a delta after the last one"
            if delta.last:
                self.last[delta.request_id] = delta
            if delta.error is not None:
                self.errors[delta.request_id] = delta.error
                continue
            if delta.finish_reason is FinishReason.CANCELLED:
                continue
            answer = self.answers[delta.request_id].setdefault(delta.choice, Answer())
            answer.tokens += delta.token_ids
            answer.logprobs += delta.logprobs or ()
            answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
            answer.end = delta if delta.finish_reason is not None else answer.end
        stats, happened = self.stats, self.happened
        happened.most_in_use = max(happened.most_in_use, stats.blocks.in_use)
        happened.held += stats.held
        happened.running = max(happened.running, stats.running)
        scheduler, manager = self.engine._scheduler, self.engine._manager
        assert manager.num_sequences == len(scheduler.running), "who does not run holds blocks"

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()

    def live(self) -> dict[str, list[str]]:
        """Requests that are not finished, by their state."""
        found: dict[str, list[str]] = {}
        for seq in self.engine._scheduler.sequences():
            if seq.seq_id == seq.request.request_id:
                found.setdefault(_state(seq), []).append(seq.seq_id)
        return found

    def assert_empty(self) -> None:
        """Its pool is as at the start, but for what the cache keeps."""
        blocks = self.stats.blocks
        assert (blocks.in_use, blocks.free + blocks.cached) == (0, blocks.total)
        assert (self.stats.waiting, self.stats.running, self.stats.held, self.stats.uncached_tokens) == (0, 0, 0, {})
        self.engine.reset_cache()
        self.engine._manager.check_invariants()
        assert self.engine._manager.counts().free == blocks.total

    def report(self, what: str) -> str:
        totals, blocks, happened = self.stats.totals, self.stats.blocks, self.happened
        return (
            f"{what}: {blocks.total} blocks, at most {happened.most_in_use} in use; {totals.steps} steps, at most "
            f"{happened.running} running, {totals.prefill_tokens} tokens prefilled, {totals.hit_tokens} of "
            f"{totals.query_tokens} hit, {totals.generated_tokens} generated, {totals.preemptions} preemptions, "
            f"{happened.held} held (sum over steps), {totals.refused_requests} refused"
        )


def _state(seq: Any) -> str:
    if seq.status is SequenceStatus.WAITING:
        return "held" if seq.held_by is not None else "preempted" if seq.preemptions else "waiting"
    if seq.status is SequenceStatus.FORKED:
        return "samples" if seq.group.search is None else "beams"
    if seq.computes_only:
        return "leader"
    return "decoding" if seq.decoding else "prefilling"


def make_engine(path: Path, shape: Shape, num_blocks: int) -> PressureEngine:
    """With all constraints compiled, so that no step depends on when a grammar comes."""
    kv_memory = num_blocks * shape.block_size * _bytes_per_token(path)
    chunk = shape.block_size * 4
    cache = CacheConfig(block_size=shape.block_size, chunk_tokens=chunk, kv_memory=kv_memory)
    config = EngineConfig(
        model=str(path),
        device="cpu",
        dtype="float32",
        threads=shape.threads,
        max_model_len=shape.max_model_len,
        max_num_seqs=shape.seats,
        token_budget=shape.budget,
        max_queue=shape.queue,
        check_invariants=True,
        strict_blocks=True,
        cache=cache,
    )
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    grammars = GrammarService(
        lambda: Vocabulary(tokenizer, vocab_size=runner.facts.vocab_size, eos_token_ids=runner.facts.eos_token_ids)
    )
    runner = ModelRunner(config, path, grammars.masks)
    assert runner.facts.num_blocks == num_blocks
    for constraint in CONSTRAINTS:
        grammars.submit(constraint).result()
    scheme = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=chunk)
    engine = assemble_engine(config, runner, scheme, None, grammars, lambda: made.now)
    made = PressureEngine(engine, grammars)
    return made


def run_spread_out(engine: PressureEngine, requests: Sequence[GenerationRequest], per_step: float) -> None:
    """They arrive at random moments between the steps, and all of them end."""
    rng = random.Random(len(requests))
    waiting = list(reversed(requests))
    while waiting:
        arrive = min(len(waiting), rng.randint(0, round(2 * per_step)))
        engine.add(waiting.pop() for _ in range(arrive))
        engine.step()
    engine.finish()


def cancel_some(engine: PressureEngine, rng: random.Random, count: int, seen: Counter[str]) -> None:
    """Anybody in the state that was met least, so that rare states are met too."""
    for _ in range(count):
        live = engine.live()
        if not live:
            return
        state = min(sorted(live), key=lambda state: seen[state])
        engine.cancel([rng.choice(live[state])])
        seen[state] += 1


def _bytes_per_token(path: Path) -> int:
    """In fp32."""
    config = json.loads((path / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 2 * 4)
