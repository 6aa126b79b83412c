"""TokenLogprob: how likely the model held a token to be, and which ones it held to be likelier.

Owns: the value and its wire form.
Does not: compute it (worker.sampling.logprobs) or know tokens' text (cluster.token_text).
Invariants: log probabilities are those of the model itself, before penalties, temperature and filters; `top` is best
first, equal ones by token id, and may lack the token itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class TokenLogprob(NamedTuple):
    """top: (token id, log probability) of the likeliest tokens at this place."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# The first token of a prompt has None: nothing came before it.
PromptLogprobs = tuple[TokenLogprob | None, ...]


def to_wire(logprobs: Iterable[TokenLogprob | None]) -> list[Any]:
    """A token's own value, then the ids and values of `top` in turn."""
    return [None if one is None else [one.logprob, *(part for pair in one.top for part in pair)] for one in logprobs]


def from_wire(wire: Iterable[Any]) -> PromptLogprobs:
    return tuple(
        None if one is None else TokenLogprob(one[0], tuple(zip(one[1::2], one[2::2], strict=True))) for one in wire
    )
