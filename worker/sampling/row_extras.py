"""RowExtras: what a row of a step wants beyond a plain token.

Owns: the values, plain ones without tensors.
Does not: compute anything (worker.sampler) or decide when a row wants it (worker.sequence).
Invariants: a plain row has none at all, so that it costs nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from worker.sampling.token_counts import TokenCounts


class RowExtras(NamedTuple):
    """candidates: how many of the best next tokens are wanted (beams).
    logprobs: the token's log probability and so many alternatives; None for neither.
    counts: the sequence's tokens, when there are penalties.
    biased: the parameters have a logit_bias.  forbidden: tokens that must not come now (ends before min_tokens).
    prompt_logprobs: the same as logprobs for the prompt tokens that follow the scheduled ones; `next_prompt_token` is
    the one behind the last, None when that one is to be chosen.
    """

    candidates: int = 0
    logprobs: int | None = None
    counts: TokenCounts | None = None
    biased: bool = False
    forbidden: frozenset[int] = frozenset()
    prompt_logprobs: int | None = None
    next_prompt_token: int | None = None

    @property
    def adjusts(self) -> bool:
        """The logits are changed before a token is chosen."""
        return self.counts is not None or self.biased or bool(self.forbidden)
