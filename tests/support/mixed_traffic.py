"""Mixed traffic for an engine under pressure: prompts that share beginnings, and every kind of answer.

Owns: what is asked; a request depends on its number alone.
Does not: run anything (pressure_engine).
Invariants: the same number is the same request, however many are made; every request fits into an engine of its shape.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.core.constraint import Constraint
from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams

CONSTRAINTS = (Constraint.regex("[0-9]{3}-[a-f]{2,4}"), Constraint.choice(["yes", "no", "perhaps"]))
DOCUMENTS = 3  # that many prompts begin with


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """longest: tokens of a prompt.  answer: the most new tokens.  seats, budget, queue: limits of the engine."""

    longest: int
    answer: int
    block_size: int
    seats: int
    budget: int
    queue: int
    threads: int

    @property
    def max_model_len(self) -> int:
        return self.longest + self.answer + self.block_size

    @property
    def ample_blocks(self) -> int:
        """Nobody ever waits for memory."""
        return self.seats * (self.max_model_len // self.block_size + 2)


class Traffic:
    """`text(number, length)`: tokens of a text that no other number begins with."""

    def __init__(self, shape: Shape, text: Callable[[int, int], Sequence[int]]) -> None:
        self._shape = shape
        self._text = text
        self._documents = [text(number, shape.longest * (number + 2) // (DOCUMENTS + 2)) for number in range(DOCUMENTS)]

    def mixed(self, count: int) -> list[GenerationRequest]:
        return [self._mixed(number) for number in range(count)]

    def small(self, count: int) -> list[GenerationRequest]:
        """Short prompts with fixed numbers of new tokens, one row or several."""
        found = []
        for number in range(count):
            rng = random.Random(f"small {number}")
            rows: dict[str, Any] = rng.choice(({}, {}, {}, {"n": 2}, {"beam_width": 2}))
            length = rng.randint(1, self._shape.answer)
            sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length, **rows)
            prompt = self._prompt(number, rng, self._shape.longest // 4)
            found.append(_request(number, prompt, rng, sampling))
        return found

    def _mixed(self, number: int) -> GenerationRequest:
        rng = random.Random(f"mixed {number}")
        prompt = self._prompt(number, rng, self._shape.longest)
        drawn = {"seed": number + 1, "temperature": rng.choice((0.7, 1.0, 1.3))}
        options: dict[str, Any]
        options, constraint = rng.choices(
            (
                ({"temperature": 0.0}, None),
                ({"temperature": 0.0, "logprobs": 2}, None),
                ({"temperature": 0.0, "stop_token_ids": tuple(self._text(number + 1000, 40))}, None),
                (drawn, None),
                ({**drawn, "top_k": 50, "top_p": 0.9, "logprobs": 1}, None),
                ({**drawn, "repetition_penalty": 1.3, "presence_penalty": 0.5, "min_p": 0.02}, None),
                ({**drawn, "n": 2}, None),
                ({**drawn, "n": 1, "best_of": 3}, None),
                ({"beam_width": 2}, None),
                ({"temperature": 0.0, "prompt_logprobs": 1}, None),
                ({**drawn, "prompt_logprobs": 0, "n": 2}, None),
                ({"temperature": 0.0}, CONSTRAINTS[0]),
                ({**drawn, "n": 2}, CONSTRAINTS[0]),
                (drawn, CONSTRAINTS[1]),
            ),
            weights=(5, 2, 2, 4, 2, 2, 2, 1, 4, 1, 1, 1, 1, 1),
        )[0]
        options["max_tokens"] = rng.choice((1, 2, self._shape.answer // 2, self._shape.answer, self._shape.answer))
        options["ignore_eos"] = constraint is None and rng.random() < 0.8
        return _request(number, prompt, rng, SamplingParams(**options), constraint)

    def _prompt(self, number: int, rng: random.Random, longest: int) -> Sequence[int]:
        family, own = number // 4, self._text(number + 1000, rng.randint(1, 9))
        if _comes_in_company(number):  # who comes second finds the first at work on what they share
            return [*self._text(family + 5000, longest // 2), *own]
        kind = rng.random()
        if kind < 0.1:
            return self._text(number + 1000, rng.randint(1, 3))
        if kind < 0.35:
            return self._text(number + 1000, rng.randint(4, longest))
        document = rng.choice(self._documents)[:longest]
        if kind < 0.45:
            return document
        start = document[: rng.choice((len(document), rng.randint(1, len(document))))]
        return [*start, *self._text(number + 1000, rng.randint(1, longest // 10))][:longest]


def _comes_in_company(number: int) -> bool:
    """Four neighbours that begin alike, and nobody else does."""
    return number // 4 % 3 == 0


def _request(
    number: int,
    prompt: Sequence[int],
    rng: random.Random,
    sampling: SamplingParams,
    constraint: Constraint | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"r{number}",
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        cache_salt=rng.choice(("", "", "", "red", "blue")) if not _comes_in_company(number) else "",
        constraint=constraint,
        priority=rng.choice((0, 0, 0, 0, 1, 1, -1)),
    )
