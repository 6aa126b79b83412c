"""PromptSet: the requests of one kind of traffic, as token ids, in the order in which they come.

    agent         one long tool prompt, then a question                        the question differs
    rag           instructions, documents, then a question                     the question differs
    rag-reordered the same documents, in another order every time              what people trip over
    chat          system prompt, then turns; each has all before it            answers included
    coding        one file, then what shall be done                            the instruction differs
    coding-edit   the same, but between two requests a token enters the middle of the file
    unique        nothing in common

Owns: these shapes, drawn from a seed.
Does not: run anything; the answers inside a chat's history are whatever the engine said.
Invariants: pure; the same seed, sizes and vocabulary give the same tokens; every prompt fits into `longest`.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """conversations: of turns; a lone request is a conversation of one turn. A turn is what comes new."""

    name: str
    conversations: tuple[tuple[Tokens, ...], ...]
    answer_tokens: int

    @property
    def num_requests(self) -> int:
        return sum(len(turns) for turns in self.conversations)


class TokenSource:
    """Random tokens. `vocabulary`: ids that may come, from the first to before the last."""

    def __init__(self, seed: int, vocabulary: tuple[int, int]) -> None:
        self._rng = random.Random(seed)
        self._vocabulary = range(*vocabulary)

    def take(self, count: int) -> Tokens:
        return tuple(self._rng.choices(self._vocabulary, k=count))


def prompt_sets(source: TokenSource, longest: int = 3200, requests: int = 8) -> list[PromptSet]:
    """`longest`: of all prompts, in tokens; the shapes shrink with it. At 3200 the tool prompt has 3000."""

    def scaled(tokens: int) -> int:
        return max(tokens * longest // 3200, 4)

    question, answer = scaled(40), scaled(32)

    def asked(start: Tokens) -> tuple[Tokens, ...]:
        return (start + source.take(question),)

    def alone(name: str, starts: list[Tokens]) -> PromptSet:
        return PromptSet(name=name, conversations=tuple(asked(start) for start in starts), answer_tokens=answer)

    tools, code, rules = source.take(scaled(3000)), source.take(scaled(2400)), source.take(scaled(60))
    documents = [source.take(scaled(700)) for _ in range(3)]
    orders = list(itertools.islice(itertools.cycle(itertools.permutations(documents)), min(requests, 6)))
    middle = len(code) // 2
    edited = [code]
    for _ in range(requests - 1):
        edited.append(edited[-1][:middle] + source.take(1) + edited[-1][middle:])
    system = source.take(scaled(120))
    chats = tuple(
        (system + source.take(question), *(source.take(question) for _ in range(4)))
        for _ in range(max(requests // 2, 2))
    )
    return [
        alone("agent", [tools] * requests),
        alone("rag", [rules + sum(documents, ())] * len(orders)),
        alone("rag-reordered", [rules + sum(order, ()) for order in orders]),
        PromptSet(name="chat", conversations=chats, answer_tokens=answer),
        alone("coding", [code] * requests),
        alone("coding-edit", edited),
        alone("unique", [source.take(scaled(600)) for _ in range(requests)]),
    ]
