"""A whole engine over a tiny random model, for tests of what it answers: alone, in company, preempted, cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.config import CacheConfig, EngineConfig
from cluster.core.constraint import Constraint
from cluster.core.errors import KvrayError
from cluster.core.hashing import RouteScheme
from cluster.core.logprobs import PromptLogprobs, TokenLogprob
from cluster.core.request import GenerationRequest, TokenDelta
from cluster.core.sampling import SamplingParams
from worker.engine import Engine
from worker.engine_assembly import assemble_engine
from worker.frame import EngineCommand
from worker.grammar.grammar_service import GrammarService
from worker.grammar.vocabulary import Vocabulary
from worker.model_runner import ModelRunner


@dataclass
class Answer:
    """One choice of a request, put together from its deltas."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    cached: int | None = None
    end: TokenDelta | None = None


class SamplingEngine:
    """`vocabulary`: loads the one for constraints; whoever gives it closes the engine."""

    def __init__(self, path: Path, *, vocabulary: Callable[[], Vocabulary] | None = None, **changes: Any) -> None:
        cache = CacheConfig(
            block_size=8, chunk_tokens=16, kv_memory=2**22, prefix_cache=changes.pop("prefix_cache", "radix")
        )
        values = {"dtype": "float32", "max_model_len": 256, "check_invariants": True, "strict_blocks": True, **changes}
        config = EngineConfig(model=str(path), device="cpu", threads=1, cache=cache, **values)
        scheme = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=cache.chunk_tokens)
        self.grammars = None if vocabulary is None else GrammarService(vocabulary)
        runner = ModelRunner(config, path, None if self.grammars is None else self.grammars.masks)
        self.engine: Engine = assemble_engine(config, runner, scheme, _words, self.grammars)
        self.answers: dict[str, dict[int, Answer]] = {}
        self.steps = 0

    def compile(self, constraint: Constraint) -> None:
        """So that a request with it runs at once."""
        assert self.grammars is not None
        self.grammars.submit(constraint).exception()

    def add(self, name: str, prompt: Sequence[int], *, constraint: Constraint | None = None, **sampling: Any) -> None:
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(**{"max_tokens": 10, **sampling}),
            constraint=constraint,
        )
        self.answers[name] = {}
        self.engine.execute([EngineCommand(add=request)])

    def step(self) -> None:
        self.steps += 1
        for delta in self.engine.step().deltas:
            if delta.error is not None:
                raise delta.error
            answer = self.answers[delta.request_id].setdefault(delta.choice, Answer())
            answer.tokens += delta.token_ids
            answer.logprobs += delta.logprobs or ()
            answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
            answer.cached = delta.cached_tokens if answer.cached is None else answer.cached
            answer.end = delta if delta.finish_reason is not None else answer.end

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()

    def preempt_newest(self) -> bool:
        """As if memory had run out; False when nothing runs."""
        scheduler = self.engine._scheduler
        scheduler.preempt_one()
        return bool(scheduler.num_preemptions)

    def run(self, name: str, prompt: Sequence[int], *, preempt_at: int | None = None, **sampling: Any) -> Answer:
        """The first choice of one request that is alone in the engine."""
        return self.run_all(name, prompt, preempt_at=preempt_at, **sampling)[0]

    def run_all(
        self, name: str, prompt: Sequence[int], *, preempt_at: int | None = None, **sampling: Any
    ) -> dict[int, Answer]:
        self.add(name, prompt, **sampling)
        self.step()  # a refusal comes with the next frame, work or none
        step = 1
        while self.engine.has_work:
            if step == preempt_at:
                self.preempt_newest()
            self.step()
            step += 1
        return self.answers[name]


def refusal(engine: SamplingEngine, **sampling: Any) -> KvrayError:
    try:
        engine.run("refused", [5, 6, 7], **sampling)
    except KvrayError as error:
        return error
    raise AssertionError("it was not refused")


def _words(tokens: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)
