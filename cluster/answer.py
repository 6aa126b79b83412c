"""AnswerStreams: token deltas of one request turned into text, with the reason why each choice ended.

Owns: joining the detokeniser, the stop strings and the engine's own finish reason.
Does not: cancel the engine's request after a stop string; whoever reads the deltas leaves the stream once `done`.
Invariants: exactly one piece of a choice has a finish_reason, and it is the choice's last.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.logprobs import PromptLogprobs, TokenLogprob
from cluster.core.request import FinishReason, TokenDelta
from cluster.core.sampling import SamplingParams
from cluster.text_stream import TextStream
from cluster.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPiece:
    """logprobs and prompt_logprobs as in TokenDelta; the former are those of `token_ids`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class AnswerStreams:
    """One stream per choice of a request."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._open = {choice: _AnswerStream(tokenizer, sampling) for choice in range(sampling.num_choices)}

    @property
    def done(self) -> bool:
        """Every choice has ended."""
        return not self._open

    def feed(self, delta: TokenDelta) -> AnswerPiece | None:
        """None: this choice has ended already, at a stop string that the engine did not look for."""
        stream = self._open.get(delta.choice)
        if stream is None:
            return None
        piece = stream.feed(delta)
        if piece.finish_reason is not None:
            del self._open[delta.choice]
        return piece


class _AnswerStream:
    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._text = TextStream(
            tokenizer,
            sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens if sampling.stop else 0,
        )

    def feed(self, delta: TokenDelta) -> AnswerPiece:
        piece = self._text.feed(delta.token_ids)
        text, stopped = piece.text, piece.stopped
        if delta.finish_reason is not None and not stopped:
            text += self._text.finish()
            stopped = self._text.stopped
        reason = FinishReason.STOP if stopped else delta.finish_reason
        return AnswerPiece(
            text=text,
            token_ids=piece.token_ids,
            finish_reason=reason,
            logprobs=None if delta.logprobs is None else delta.logprobs[: len(piece.token_ids)],
            prompt_logprobs=delta.prompt_logprobs,
        )
