"""TokenCounts: which tokens stand in a sequence, and how often each one was generated. For penalties.

Owns: the counts, brought up to date with the sequence's own tokens.
Does not: apply penalties (adjustments) or exist for requests without any.
Invariants: after `update`, the counts are those of the tokens alone, whatever happened before: they never forget and a
token counts once, so preemption, caching and batching change nothing; an update costs as much as there are new tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class TokenCounts:
    """ids: every different token, as it first appeared.  generated: how often each of them is in the answer."""

    __slots__ = ("_counted", "_places", "generated", "ids")

    def __init__(self) -> None:
        self.ids = array("q")
        self.generated = array("q")
        self._places: dict[int, int] = {}
        self._counted = 0

    def update(self, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """`tokens` begins as it did at the last call."""
        for position in range(self._counted, len(tokens)):
            token = tokens[position]
            place = self._places.get(token)
            if place is None:
                place = self._places[token] = len(self.ids)
                self.ids.append(token)
                self.generated.append(0)
            if position >= num_prompt_tokens:
                self.generated[place] += 1
        self._counted = len(tokens)

    def copy(self) -> TokenCounts:
        """For a fork, which has the same tokens up to here."""
        twin = TokenCounts()
        twin.ids, twin.generated = self.ids[:], self.generated[:]
        twin._places, twin._counted = dict(self._places), self._counted
        return twin
