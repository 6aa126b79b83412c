"""A model-free runner that writes fingerprints into pages and checks every sequence's whole history at each step.

A wrong share, a block freed too early or a table that was not remapped shows as a wrong fingerprint, long before
it would show as a wrong word.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from cluster.config import CacheConfig, EngineConfig
from cluster.core.hashing import RouteScheme, digest_of
from cluster.core.logprobs import PromptLogprobs, TokenLogprob
from cluster.core.request import FinishReason, GenerationRequest, TokenDelta
from cluster.core.sampling import SamplingParams
from worker import step_budget
from worker.batch import Batch, ScheduledSeq
from worker.beam_search import BeamParams, BeamResult, BeamSearch
from worker.engine import Engine
from worker.engine_assembly import assemble_engine
from worker.frame import EngineCommand, EngineFrame
from worker.grammar_port import GrammarPort
from worker.runner import ModelFacts, Sampled

VOCAB = 1000
EOS = 999
LAYERS = 2

Page = list[tuple[int, int, int] | None]


def next_token(tokens: Iterable[int]) -> int:
    """The fake model: depends on every token before it; never the end-of-sequence token."""
    return int(digest_of(repr(list(tokens)).encode())[:8], 16) % (VOCAB - 1)


def expected_answer(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def sampled_token(tokens: list[int], seed: int) -> int:
    """What a row with this seed draws; seed 0 is the fake model's greedy choice."""
    return next_token([*tokens, -seed] if seed else tokens)


def expected_sample(prompt: list[int], count: int, seed: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sampled_token(tokens, seed))
    return tokens[len(prompt) :]


def candidates(tokens: list[int], count: int) -> tuple[tuple[int, float], ...]:
    """The fake model's best next tokens, best first; now and then the end of the sequence is among them."""
    found: dict[int, float] = {}
    for place in range(count):
        draw = next_token([*tokens, -1000 - place])
        found.setdefault(EOS if draw % 13 == 0 else draw, -0.5 * place - (draw % 100) / 100 - 0.1)
    return tuple(sorted(found.items(), key=lambda pair: -pair[1]))


def prompt_logprob(token: int) -> TokenLogprob:
    """What the fake model thinks of a token of a prompt."""
    return TokenLogprob(-float(token % 11))


def prompt_logprobs(seq: ScheduledSeq) -> tuple[TokenLogprob, ...]:
    """Of the prompt tokens behind the scheduled ones, where the row wants them."""
    if seq.extras is None or seq.extras.prompt_logprobs is None:
        return ()
    behind = seq.extras.next_prompt_token
    return tuple(prompt_logprob(token) for token in [*seq.token_ids[1:], *([] if behind is None else [behind])])


def expected_prompt_logprobs(prompt: list[int]) -> PromptLogprobs:
    return (None, *(prompt_logprob(token) for token in prompt[1:]))


def expected_beams(prompt: list[int], params: BeamParams) -> list[BeamResult]:
    """The same search without an engine: every row computed from scratch."""
    search = BeamSearch(params)
    while not search.done:
        rows = [candidates([*prompt, *beam.tokens], search.num_candidates) for beam in search.live]
        search.advance(rows)
    return search.results()


class FingerprintRunner:
    """pages[block][layer * block_size + slot] holds (layer, position, lineage); lineage numbers all tokens up to there.

    Before anything is written, the whole history of every row of the batch is checked in every layer.
    """

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.pages: list[Page] = [[None] * (LAYERS * block_size) for _ in range(num_blocks)]
        self.block_size = block_size
        self.computed_tokens = 0
        self.steps = 0
        self.histories: dict[str, list[int]] = {}
        self._lineages: dict[tuple[int, int], int] = {}  # (lineage of one token less, token) -> lineage
        self._made_of: list[tuple[int, int]] = []  # the other way round
        self.facts = ModelFacts(
            model="fake",
            vocab_size=VOCAB,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            num_layers=LAYERS,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            dtype="none",
            device="none",
            attention="none",
            weight_bytes=0,
            kv_bytes_per_token=1,
            num_blocks=num_blocks,
            block_size=block_size,
            model_revision="fake",
            kv_fingerprint="fake",
        )

    def run(self, batch: Batch) -> list[Sampled]:
        self.steps += 1
        for source, target in batch.copies:
            self.pages[target] = list(self.pages[source])
        for seq in batch.seqs:
            assert len(seq.token_ids) > 0, "an empty piece was scheduled"
            self._check(seq, self._history(seq))
        scored = sum(len(seq.token_ids) for seq in batch.seqs if prompt_logprobs(seq))
        assert scored <= step_budget.MAX_SCORED, "more rows of logits than a step may have"
        sampled: list[Sampled] = []
        for seq in batch.seqs:
            history = self._history(seq)
            history += seq.token_ids[len(history) - seq.start :]
            assert history[seq.start : seq.end] == list(seq.token_ids), "a scheduled token differs from the sequence"
            self._write(seq, history)
            self.computed_tokens += len(seq.token_ids)
            if seq.sample:
                wanted = 0 if seq.extras is None else seq.extras.candidates
                best = candidates(history[: seq.end], wanted)
                token = sampled_token(history[: seq.end], seq.sampling.seed)
                prompt = prompt_logprobs(seq)
                sampled.append(Sampled(token, TokenLogprob(-float(token % 7) / 7), best, prompt_logprobs=prompt))
        return sampled

    def _history(self, seq: ScheduledSeq) -> list[int]:
        """What the sequence has computed. A new row of a group goes on from what its last shared slot holds."""
        if seq.seq_id not in self.histories:
            prompt = self.histories[seq.seq_id.split("/")[0]]
            history = self._tokens_up_to(seq) if seq.start else []
            common = min(len(history), len(prompt))
            assert history[:common] == prompt[:common], "a row was forked from another prompt"
            self.histories[seq.seq_id] = history
        return self.histories[seq.seq_id]

    def _tokens_up_to(self, seq: ScheduledSeq) -> list[int]:
        block, slot = divmod(seq.start - 1, self.block_size)
        content = self.pages[seq.block_ids[block]][slot]
        assert content is not None, "a row was forked from nothing"
        tokens: list[int] = []
        lineage = content[2]
        while lineage >= 0:
            lineage, token = self._made_of[lineage]
            tokens.append(token)
        return tokens[::-1]

    def _check(self, seq: ScheduledSeq, history: list[int]) -> None:
        assert len(history) >= seq.start, "tokens were skipped"
        for position, page, slot, content in self._slots(seq.block_ids, history, 0, seq.start):
            assert page[slot] == content, f"foreign KV at position {position}"

    def _write(self, seq: ScheduledSeq, history: list[int]) -> None:
        for _, page, slot, content in self._slots(seq.block_ids, history, seq.start, seq.end):
            page[slot] = content

    def _slots(
        self, block_ids: Sequence[int], history: list[int], start: int, end: int
    ) -> Iterator[tuple[int, Page, int, tuple[int, int, int]]]:
        """Position, page, slot and right content, in every layer."""
        lineages = self._lineages_of(history[:end])
        for position in range(start, end):
            block, slot = divmod(position, self.block_size)
            for layer in range(LAYERS):
                content = (layer, position, lineages[position])
                yield position, self.pages[block_ids[block]], layer * self.block_size + slot, content

    def _lineages_of(self, tokens: list[int]) -> list[int]:
        lineages: list[int] = []
        lineage = -1
        for token in tokens:
            step = (lineage, token)
            lineage = self._lineages.setdefault(step, len(self._made_of))
            if lineage == len(self._made_of):
                self._made_of.append(step)
            lineages.append(lineage)
        return lineages


@dataclass
class FakeEngine:
    """An engine over a FingerprintRunner, driven step by step."""

    engine: Engine
    runner: FingerprintRunner
    answers: dict[str, list[int]] = field(default_factory=dict)
    choices: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    ends: dict[tuple[str, int], TokenDelta] = field(default_factory=dict)
    last: dict[str, TokenDelta] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
    frames: list[EngineFrame] = field(default_factory=list)
    ids: itertools.count[int] = field(default_factory=itertools.count)

    def add(self, prompt: list[int], max_tokens: int | None = 8, **options: object) -> str:
        request_id = f"r{next(self.ids)}"
        command = self.command(request_id, prompt, max_tokens, **options)
        self.answers[request_id] = []
        self.engine.execute([command])
        return request_id

    def command(
        self, request_id: str, prompt: list[int], max_tokens: int | None = 8, **options: object
    ) -> EngineCommand:
        """A request that the runner knows how to check, for whoever drives the engine through commands."""
        salt = str(options.pop("cache_salt", ""))
        constraint = options.pop("constraint", None)
        priority = int(options.pop("priority", 0))  # type: ignore[call-overload]
        timeout_s = cast("float | None", options.pop("timeout_s", None))
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, **options)  # type: ignore[arg-type]
        self.runner.histories[request_id] = list(prompt)
        return EngineCommand(
            add=GenerationRequest(
                request_id=request_id,
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                router_id="router",
                cache_salt=salt,
                constraint=constraint,  # type: ignore[arg-type]
                priority=priority,
                timeout_s=timeout_s,
            )
        )

    def cancel(self, request_id: str) -> None:
        self.engine.execute([EngineCommand(cancel=request_id)])

    def step(self) -> EngineFrame:
        frame = self.engine.step()
        self.frames.append(frame)
        for delta in frame.deltas:
            assert delta.request_id not in self.last, "a delta after the last one"
            if delta.choice == 0:
                self.answers[delta.request_id] += delta.token_ids
            choice = (delta.request_id, delta.choice)
            whole = delta.error is not None or delta.finish_reason is FinishReason.CANCELLED  # the end of all choices
            assert whole or choice not in self.ends, "a delta after the end of a choice"
            if delta.finish_reason is not None:
                self.ends[choice] = delta
            self.choices.setdefault(delta.request_id, {}).setdefault(delta.choice, []).extend(delta.token_ids)
            if delta.prompt_logprobs is not None:
                assert delta.request_id not in self.prompt_logprobs, "prompt_logprobs were told twice"
                self.prompt_logprobs[delta.request_id] = delta.prompt_logprobs
            if delta.cached_tokens is not None and delta.choice == 0:
                assert delta.request_id not in self.cached, "cached_tokens was told twice"
                self.cached[delta.request_id] = delta.cached_tokens
            if delta.last:
                self.last[delta.request_id] = delta
        return frame

    def finish(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.engine.has_work:
                self.step()
                return
            self.step()
        raise AssertionError(f"work is left after {limit} steps")


def make_fake_engine(num_blocks: int = 32, block_size: int = 4, **options: object) -> FakeEngine:
    """`options` go to EngineConfig, except prefix_cache, max_model_len (default: the whole pool), grammars, clock."""
    grammars = cast("GrammarPort | None", options.pop("grammars", None))
    clock = cast("Callable[[], float]", options.pop("clock", time.monotonic))
    max_model_len = int(options.pop("max_model_len", num_blocks * block_size))  # type: ignore[call-overload]
    cache = CacheConfig(
        block_size=block_size,
        chunk_tokens=2 * block_size,
        prefix_cache=options.pop("prefix_cache", "radix"),
        partial_reuse=options.pop("partial_reuse", True),
    )
    config = EngineConfig(cache=cache, check_invariants=True, strict_blocks=True, **options)
    runner = FingerprintRunner(num_blocks, block_size, max_model_len)
    scheme = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=cache.chunk_tokens)
    return FakeEngine(assemble_engine(config, runner, scheme, _words, grammars, clock), runner)


def _words(tokens: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)
