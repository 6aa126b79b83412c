"""AnswerEvents: one request's deltas as the events that its client gets.

Owns: counting usage, naming the tokens of log probabilities, and the prompt's echo.
Does not: turn tokens into text (cluster.answer) or know HTTP or protobuf.
Invariants: as router.generation.GenerationEvent; what nobody asked for costs nothing.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from cluster.answer import AnswerPiece, AnswerStreams
from cluster.core.logprobs import TokenLogprob
from cluster.core.replica import WorkerId
from cluster.core.request import GenerationRequest, TokenDelta
from cluster.tokenizer import Tokenizer
from router.generation import GenerationEvent, LogprobEntry, Usage

_Entries = tuple[LogprobEntry, ...]


class AnswerEvents:
    """`echo`: the prompt's text, when every choice shall begin with it."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest, echo: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._answers = AnswerStreams(tokenizer, request.sampling)
        self._echo = echo
        self._echoed: set[int] = set()
        self._prompt: _Entries | None = None
        self._offsets: dict[int, _TextOffsets] = {}
        self._completion_tokens = self._cached_tokens = 0

    @property
    def done(self) -> bool:
        return self._answers.done

    def event(self, replica: WorkerId, delta: TokenDelta) -> GenerationEvent | None:
        """None: the delta's choice has ended already."""
        if delta.cached_tokens is not None:
            self._cached_tokens = delta.cached_tokens
        piece = self._answers.feed(delta)
        if piece is None:
            return None
        self._completion_tokens += len(piece.token_ids)
        prompt_logprobs, logprobs = self._prompt_entries(piece), self._entries(piece)
        text = piece.text
        if self._echo is not None:
            if logprobs is not None:
                logprobs, prompt_logprobs = self._echoed_entries(delta.choice) + logprobs, None
            text = self._echoed_text(delta.choice) + text
        return GenerationEvent(
            text=text,
            token_ids=piece.token_ids,
            usage=Usage(
                prompt_tokens=len(self._request.prompt_token_ids),
                completion_tokens=self._completion_tokens,
                cached_tokens=self._cached_tokens,
            ),
            replica=replica,
            finish_reason=piece.finish_reason,
            index=delta.choice,
            score=delta.score,
            logprobs=logprobs,
            text_offsets=() if logprobs is None else self._text_offsets(delta.choice, logprobs),
            prompt_logprobs=prompt_logprobs,
        )

    def _entries(self, piece: AnswerPiece) -> _Entries | None:
        return None if piece.logprobs is None else self._named(piece.token_ids, piece.logprobs)

    def _prompt_entries(self, piece: AnswerPiece) -> _Entries | None:
        if piece.prompt_logprobs is None:
            return None
        self._prompt = self._named(self._request.prompt_token_ids, piece.prompt_logprobs)
        return self._prompt

    def _echoed_entries(self, choice: int) -> _Entries:
        return () if choice in self._echoed else self._prompt or ()

    def _echoed_text(self, choice: int) -> str:
        if choice in self._echoed:
            return ""
        self._echoed.add(choice)
        return self._echo or ""

    def _text_offsets(self, choice: int, entries: _Entries) -> tuple[int, ...]:
        offsets = self._offsets.setdefault(choice, _TextOffsets())
        return tuple(offsets.of(entry.piece) for entry in entries)

    def _named(self, token_ids: Sequence[int], logprobs: Iterable[TokenLogprob | None]) -> _Entries:
        piece = self._tokenizer.token_bytes
        return tuple(
            LogprobEntry(token, piece(token), None)
            if one is None
            else LogprobEntry(
                token,
                piece(token),
                one.logprob,
                tuple(LogprobEntry(other, piece(other), value) for other, value in one.top),
            )
            for token, one in zip(token_ids, logprobs, strict=True)
        )


class _TextOffsets:
    """Where each token begins, in whole characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def of(self, piece: bytes) -> int:
        begin = self._length
        self._length += len(self._decoder.decode(piece))
        return begin
