"""mixed_requests: requests of unlike lengths, whose answers end before the length they asked for.

Owns: the distribution.
Does not: know tokens; only counts matter to memory.
Invariants: the same seed gives the same requests; an answer is never longer than asked for.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

PROMPTS = (24, 200)  # tokens, short ones more often
ASKED = (64, 96, 128, 160)  # max_tokens
MEAN_ANSWER = 40


@dataclass(frozen=True, slots=True)
class MixedRequest:
    """max_tokens: what the client asked for, and a server must expect. answer_tokens: how it ends, known to nobody."""

    name: str
    prompt_tokens: int
    max_tokens: int
    answer_tokens: int

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.max_tokens

    @property
    def total(self) -> int:
        """What it holds at its end. Its last token has no KV, but has a slot before it is known to be the last."""
        return self.prompt_tokens + self.answer_tokens

    def resumed(self, generated: int) -> MixedRequest:
        """After a preemption: what it generated is computed again, as part of the prompt."""
        return replace(
            self,
            prompt_tokens=self.prompt_tokens + generated,
            max_tokens=self.max_tokens - generated,
            answer_tokens=self.answer_tokens - generated,
        )


def mixed_requests(count: int, seed: int) -> list[MixedRequest]:
    rng = random.Random(seed)
    low, high = map(math.log, PROMPTS)
    made = []
    for number in range(count):
        asked = rng.choice(ASKED)
        answer = min(asked, 4 + int(rng.expovariate(1 / MEAN_ANSWER)))
        made.append(MixedRequest(f"m{number}", round(math.exp(rng.uniform(low, high))), asked, answer))
    return made
