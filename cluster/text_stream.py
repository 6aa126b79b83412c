"""TextStream: one request's tokens to text, piece by piece, ending at a stop string.

    tokens --_Detokenizer--> whole characters --_StopMatcher--> text that no stop string can still claim

Owns: incremental decoding, and looking for stop strings in the generated text.
Does not: see the prompt or decide about stop token ids and lengths (worker.scheduler).
Invariants: without a stop string the pieces, `finish()` included, add up to `tokenizer.decode(all ids)`; an
incomplete UTF-8 tail is held back while more tokens may complete it (64 tokens at most), and `finish()` gives it
out as U+FFFD, as `decode` does; stop text is given out only where it was asked for, and nothing behind it ever; how
tokens are cut into feeds never changes the text.

Which stop string wins: the one that is complete first, as generation would meet it character by character; of
those that end at the same character the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# So many tokens in a row without one whole character are no text; they are given out as they are, which bounds the
# work per token.
_MAX_PENDING_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """What a feed added. token_ids: the fed ids that count, through the one that completed a stop string.

    `text` may lag behind `token_ids`; `finish()` releases the rest.
    """

    text: str
    token_ids: tuple[int, ...]
    stopped: bool


class TextStream:
    """State of one answer. After a stop, further feeds add nothing.

    include_stop: the stop string is given out too.  min_tokens: one that is complete with the first so many tokens is
    plain text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._detokenizer = _Detokenizer(tokenizer)
        self._matcher = _StopMatcher(stop, include_stop)
        self._unstoppable = min_tokens

    @property
    def stopped(self) -> bool:
        return self._matcher.stopped

    def feed(self, token_ids: Sequence[int]) -> TextPiece:
        """Add new tokens. Those after the one that completes a stop string are ignored."""
        texts: list[str] = []
        used = 0
        for token_id in token_ids:
            if self._matcher.stopped:
                break
            used += 1
            text = self._detokenizer.feed(token_id)
            if self._unstoppable:
                self._unstoppable -= 1
                texts.append(self._matcher.feed(text, may_stop=False))
            else:
                texts.append(self._matcher.feed(text))
        return TextPiece(text="".join(texts), token_ids=tuple(token_ids[:used]), stopped=self._matcher.stopped)

    def finish(self) -> str:
        """No more tokens will come: the text that was held back. Call once; `stopped` may turn True here."""
        text = "" if self.stopped else self._matcher.feed(self._detokenizer.finish(), may_stop=not self._unstoppable)
        return text + self._matcher.finish()


class _Detokenizer:
    """Decodes a sliding window: tokens whose text is out (`_context`) and tokens whose text is not (`_pending`).

    The context is there because decoders treat the first token of a text differently (its leading space). Text
    that ends with U+FFFD may end inside a character, so all of the pending text waits.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        """Characters that became certain with this token."""
        if self._tokenizer.is_silent(token_id):
            return ""
        self._pending.append(token_id)
        text = self._pending_text()
        if text.endswith(_REPLACEMENT) and len(self._pending) < _MAX_PENDING_TOKENS:
            return ""
        # Tokens without text join the context, so that it never loses its meaning.
        self._context = self._pending if text else self._context + self._pending
        self._context_text = self._tokenizer.decode(self._context)
        self._pending = []
        return text

    def finish(self) -> str:
        return self._pending_text() if self._pending else ""

    def _pending_text(self) -> str:
        text = self._tokenizer.decode(self._context + self._pending)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # A byte-fallback decoder takes back a good character when a bad byte follows it. It is out already.
        return self._tokenizer.decode(self._pending)


class _StopMatcher:
    """Passes text through, except for an end that may be the beginning of a stop string."""

    def __init__(self, stop: tuple[str, ...], include: bool) -> None:
        self._stop = stop
        self._include = include
        self._longest = max((len(text) for text in stop), default=0)
        self._held = ""
        self.stopped = False

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        if not self._stop or not text:
            return text
        buffer = self._held + text
        found = self._first_stop(buffer, len(self._held)) if may_stop else None
        if found is not None:
            self.stopped, self._held = True, ""
            return buffer[: found[1] if self._include else found[0]]
        keep = self._beginning(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first_stop(self, buffer: str, seen: int) -> tuple[int, int] | None:
        """Start and end of the stop string that is complete first, behind the first `seen` characters."""
        starts = ((text, buffer.find(text, max(0, seen - len(text) + 1))) for text in self._stop)
        found = [(start + len(text), start) for text, start in starts if start >= 0]
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _beginning(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop string."""
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            end = buffer[-length:]
            if any(text.startswith(end) for text in self._stop):
                return length
        return 0
