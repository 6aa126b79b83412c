"""Keying: a way to find cached prefixes: how an engine is told to do it, and what it should find.

A hash over the whole prompt is the production engine with a cache salt made of the whole prompt: requests share KV
with requests of the same salt only, which then are those with the same prompt.

Owns: the five keyings, and running a PromptSet with each, the engine's hits beside the lab's own count.
Does not: count (prefix_counts) or engines (lab_engines).
Invariants: every request is run alone, so that all before it is findable; engine and count see the same sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cluster.core.hashing import digest_of, pack_tokens
from cluster.core.sampling import SamplingParams
from cluster.lab.driven_engine import Answered, DrivenEngine
from cluster.lab.prefix_counts import ChunkCount, LongestPrefixCount, NothingCount, PrefixCount, WholePromptCount
from cluster.lab.prompt_sets import PromptSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Keying:
    """options: of the engine.  salted: the salt is the whole prompt.  count: a new count of what it should find."""

    name: str
    label: str
    count: Callable[[], PrefixCount]
    options: Mapping[str, Any] = field(default_factory=dict)
    salted: bool = False

    def ask(self, engine: DrivenEngine, prompt: tuple[int, ...], sampling: SamplingParams) -> Answered:
        return engine.ask(prompt, sampling, digest_of(pack_tokens(prompt)) if self.salted else "")


def chunk_keying(chunk_tokens: int) -> Keying:
    return Keying(
        name=f"chunk{chunk_tokens}",
        label=f"chunk hash {chunk_tokens}",
        count=lambda: ChunkCount(chunk_tokens),
        options={"prefix_cache": "chunk", "chunk_tokens": chunk_tokens},
    )


OFF = Keying(name="off", label="off", count=NothingCount, options={"prefix_cache": "off"})
WHOLE = Keying(name="whole", label="whole-prompt hash", count=WholePromptCount, salted=True)
RADIX = Keying(name="radix", label="radix", count=LongestPrefixCount)
KEYINGS = (OFF, WHOLE, chunk_keying(64), chunk_keying(128), RADIX)


class Reuse(NamedTuple):
    """Sums over the requests of a set. counted_hits: by the lab; hits: by the engine."""

    prompt_tokens: int
    hits: int
    counted_hits: int
    first_s: tuple[float, ...]

    @property
    def computed(self) -> int:
        return self.prompt_tokens - self.hits

    @property
    def share(self) -> float:
        return self.hits / self.prompt_tokens


def run_set(prompts: PromptSet, keying: Keying, engine: DrivenEngine) -> Reuse:
    """Turn by turn: the first turns of all conversations, then the second ones, each with all that was said before."""
    sampling = SamplingParams(temperature=0.0, max_tokens=prompts.answer_tokens, ignore_eos=True)
    count = keying.count()
    histories: list[tuple[int, ...]] = [()] * len(prompts.conversations)
    tokens = hits = counted = 0
    first_s: list[float] = []
    for turn in range(max(len(turns) for turns in prompts.conversations)):
        for number, turns in enumerate(prompts.conversations):
            if turn == len(turns):
                continue
            prompt = histories[number] + turns[turn]
            counted += count.hit(prompt)
            answer = keying.ask(engine, prompt, sampling)
            histories[number] = prompt + answer.tokens
            count.learn(prompt, histories[number][:-1])  # the newest token's KV is not computed
            tokens += len(prompt)
            hits += answer.cached_tokens
            first_s.append(answer.first_s)
    assert engine.totals.hit_tokens == hits, "deltas and totals of the engine disagree"
    return Reuse(tokens, hits, counted, tuple(first_s))
