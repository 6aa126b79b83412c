"""Beam search: which rows go on, which texts are finished, and when the search is over.

The rules are those of the vectorised beam search in transformers 5 (`generate(num_beams=W, do_sample=False)`): the same
sequences in the same order, and the same scores up to float32 rounding.

    step n: live rows x their best tokens, ranked by summed log probability
            the best `width` that do not end  -> the live rows of step n + 1
            those that end, ranked < width    -> finished, of which the best `width` by score are kept
            score = log probability / (generated tokens, the end token included) ** length_penalty

Owns: ranking, the finished texts and their scores, the stopping rules.
Does not: know the prompt, run the model, hold KV or look for stop strings (it asks `ends` about each new text).
Invariants: all live rows have the same length, at most `width` of them, best first; a finished text is never extended;
equal scores are ordered by row, then by token id, then by age, the older first. A search that is over has no live rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cluster.core.request import FinishReason

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """Validated by whoever makes it.

    eos_token_ids: every token that ends a text, the request's stop tokens too.
    length_penalty: the power of the length that divides the log probability; above 0 favours long texts.
    early_stopping: True ends at the first `width` finished texts; False goes on while the best live row, scored at its
    present length, beats the worst of them; "never" also credits it with the length that it may still reach.
    """

    width: int
    max_tokens: int
    eos_token_ids: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        assert self.width >= 1 and self.max_tokens >= 1, f"width {self.width}, max_tokens {self.max_tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """A live row: the tokens after the prompt, and their log probability (a sum, <= 0)."""

    tokens: tuple[int, ...]
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamResult:
    """A finished text; `tokens` include the token that ended it."""

    tokens: tuple[int, ...]
    score: float
    logprob: float
    finish_reason: FinishReason


class Extension(NamedTuple):
    """A new live row: live row `row` of the step before, followed by `token`."""

    row: int
    token: int


class BeamSearch:
    """One search. Until `done`: find the best tokens of every live row, and pass them to `advance`.

    ends: asked about candidate texts (all tokens after the prompt), best first, until `width` go on; True finishes the
    text as an end token does. Stop strings belong here: found only after the step, a text that ends would have taken
    the place of a live row, or be lost with the live rows when the search ends.
    """

    def __init__(self, params: BeamParams, ends: Callable[[tuple[int, ...]], bool] | None = None) -> None:
        self._params = params
        self._ends = ends
        self._live = [Beam(tokens=(), logprob=0.0)]
        self._finished: list[BeamResult] = []  # best first
        self._length = 0

    @property
    def num_candidates(self) -> int:
        """How many tokens of each row `advance` needs; all of them where the vocabulary is smaller.

        At most `width` of a row's tokens go on, and each end token can rank before them. The second `width` are spares
        for texts that `ends` finishes; should they run out, the next step has fewer rows.
        """
        return 2 * self._params.width + len(self._params.eos_token_ids)

    @property
    def live(self) -> Sequence[Beam]:
        return self._live

    @property
    def done(self) -> bool:
        return not self._live

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[Extension]:
        """Take one step; `candidates[r]` are the best (token id, log probability) of live row r.

        Returns the new live rows, none when the search is over. Tokens of probability 0 are never taken. Which of
        several equal tokens a row offers when not all fit is the caller's choice, and torch.topk's is arbitrary.
        """
        assert not self.done, f"the search is over after {self._length} tokens"
        width = self._params.width
        self._length += 1
        grown: list[Beam] = []
        extensions: list[Extension] = []
        for rank, (logprob, extension) in enumerate(self._ranked(candidates)):
            tokens = (*self._live[extension.row].tokens, extension.token)
            reason = self._finish_reason(tokens)
            if reason is None:
                grown.append(Beam(tokens=tokens, logprob=logprob))
                extensions.append(extension)
            elif rank < width:
                score = self._score(logprob, self._length)
                self._finished.append(BeamResult(tokens=tokens, score=score, logprob=logprob, finish_reason=reason))
            if len(grown) == width:
                break
        self._finished.sort(key=lambda result: -result.score)  # stable: the older of two equals stays ahead
        del self._finished[width:]
        self._live = [] if self._settled(grown) else grown
        return [] if self.done else extensions

    def results(self) -> list[BeamResult]:
        """The finished texts so far, best first, at most `width`.

        Fewer only if the vocabulary, or tokens of probability 0, left no more texts to find.
        """
        return list(self._finished)

    def _ranked(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[float, Extension]]:
        """Every candidate text with its log probability, best first, equals by row and token id."""
        texts = [
            (beam.logprob + logprob, Extension(row, token))
            for row, (beam, best) in enumerate(zip(self._live, candidates, strict=True))
            for token, logprob in best
            if logprob > -math.inf
        ]
        texts.sort(key=lambda text: (-text[0], text[1]))
        return texts[: self._params.width] if self._length == self._params.max_tokens else texts  # none goes on

    def _finish_reason(self, tokens: tuple[int, ...]) -> FinishReason | None:
        if tokens[-1] in self._params.eos_token_ids or (self._ends is not None and self._ends(tokens)):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) == self._params.max_tokens else None

    def _score(self, logprob: float, length: int) -> float:
        divisor: float = float(length) ** self._params.length_penalty
        return logprob / divisor

    def _settled(self, grown: Sequence[Beam]) -> bool:
        """Whether no live row is left, or none is held to be able to beat the finished ones."""
        params = self._params
        if not grown or len(self._finished) < params.width:
            return not grown
        if params.early_stopping is True or params.width == 1:  # one row is greedy decoding: its first end is the end
            return True
        hopeful = params.early_stopping == "never" and params.length_penalty > 0.0
        length = params.max_tokens if hopeful else self._length
        return self._score(grown[0].logprob, length) <= self._finished[-1].score
