"""Workload: which prompts a run sends, in which order, how many at a time.

    W1      one request, 64 tokens in, 128 out                               a single stream
    W2      32 requests, 1024 shared + 64 own in, 32 out, 8 at a time        a shared system prompt
    W2_off  the same with the server's prefix cache defeated                 what sharing is worth
    W3      8 conversations of 6 turns, 64 in, 48 out, 4 at a time           a chat: the history comes back
    W4      32 requests, 32..1024 in, 16..128 out, 16 at a time              mixed traffic
    W5      one request, 4096 tokens in, 64 out                              a long document

Owns: these shapes, and writing the texts of one run from a seed.
Does not: send anything (driver), or know how a server's cache is defeated (the peers).
Invariants: pure; the same workload, words and seed give the same texts; a text of N words is N tokens (WordList).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core.errors import ConfigError

_LENGTHS_SEED = "W4"  # W4's lengths are the same in every run; only its texts differ


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnShape:
    """One request: so many new words after everything said before, and so many tokens of answer."""

    words: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """conversations: turns that follow one another; a lone request is a conversation of one turn.

    shared_words: every conversation opens with the same so many words.  concurrency: conversations at the same time.
    caching: False asks the server not to reuse anything.
    """

    name: str
    conversations: tuple[tuple[TurnShape, ...], ...]
    concurrency: int = 1
    shared_words: int = 0
    caching: bool = True

    @property
    def prompt_words(self) -> int:
        """Words of all new texts together (histories not counted again)."""
        own = sum(turn.words for conversation in self.conversations for turn in conversation)
        return own + self.shared_words * len(self.conversations)

    @property
    def answer_tokens(self) -> int:
        return sum(turn.max_tokens for conversation in self.conversations for turn in conversation)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request adds to its conversation."""

    text: str
    max_tokens: int


def write_texts(workload: Workload, words: Sequence[str], seed: str) -> list[list[Turn]]:
    """The texts of one run. A fresh seed for each run keeps it from being answered out of an earlier run's cache."""
    rng = random.Random(seed)
    shared = write_text(rng, words, workload.shared_words)
    conversations = []
    for shapes in workload.conversations:
        turns = [Turn(write_text(rng, words, shape.words), shape.max_tokens) for shape in shapes]
        turns[0] = Turn(shared + turns[0].text, turns[0].max_tokens)
        conversations.append(turns)
    return conversations


def write_text(rng: random.Random, words: Sequence[str], count: int) -> str:
    return "".join(f" {rng.choice(words)}" for _ in range(count))


def _alone(words: int, max_tokens: int) -> tuple[TurnShape, ...]:
    return (TurnShape(words=words, max_tokens=max_tokens),)


def _mixed_lengths() -> tuple[tuple[TurnShape, ...], ...]:
    rng = random.Random(_LENGTHS_SEED)
    return tuple(_alone(rng.randint(32, 1024), rng.randint(16, 128)) for _ in range(32))


def _all_workloads() -> tuple[Workload, ...]:
    sharing = (_alone(64, 32),) * 32
    chats = (_alone(64, 48) * 6,) * 8
    return (
        Workload(name="W1", conversations=(_alone(64, 128),)),
        Workload(name="W2", conversations=sharing, concurrency=8, shared_words=1024),
        Workload(name="W2_off", conversations=sharing, concurrency=8, shared_words=1024, caching=False),
        Workload(name="W3", conversations=chats, concurrency=4),
        Workload(name="W4", conversations=_mixed_lengths(), concurrency=16),
        Workload(name="W5", conversations=(_alone(4096, 64),)),
    )


WORKLOADS = {workload.name: workload for workload in _all_workloads()}


def choose(names: str) -> list[Workload]:
    """`W1,W3` -> these workloads, in this order. ConfigError names one that does not exist."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in WORKLOADS]
    if unknown or not chosen:
        what = f"no workload {unknown[0]!r}" if unknown else "no workload named"
        raise ConfigError(f"{what}; there are {', '.join(WORKLOADS)}")
    return [WORKLOADS[name] for name in dict.fromkeys(chosen)]
