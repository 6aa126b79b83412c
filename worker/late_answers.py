"""LateAnswers: how many requests got their first token, and how many of them later than they should.

Owns: these two counts since the engine started.
Does not: read clocks, or know requests (engine_client).
Invariants: the counts never fall; late ones are among the answered.
"""

from __future__ import annotations


class LateAnswers:
    """`target_s` None: nothing is late."""

    __slots__ = ("answered", "late", "target_s")

    def __init__(self, target_s: float | None = None) -> None:
        self.target_s = target_s
        self.answered = self.late = 0

    def note(self, ttft_s: float) -> None:
        self.answered += 1
        self.late += self.target_s is not None and ttft_s > self.target_s
