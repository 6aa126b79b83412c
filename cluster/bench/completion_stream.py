"""CompletionStream: the lines of one streamed /v1/completions answer, with the time each came.

Owns: the little of server-sent events that these streams use, and where servers put their token counts.
Does not: read from the network or a clock; the caller brings lines and times.
Invariants: pure; a count that the server did not send is None or counted from the chunks, never invented.
"""

from __future__ import annotations

import json
from typing import Any

from cluster.bench.peer import TimedAnswer
from cluster.core.errors import KvrayError


class CompletionStream:
    def __init__(self) -> None:
        self.done = False
        self._texts: list[str] = []
        self._first: float | None = None
        self._last = 0.0
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, Any] = {}  # llama.cpp's own counts

    def feed(self, line: bytes, at_s: float) -> None:
        """`at_s`: seconds since the request. KvrayError when the server reports one."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return
        chunk = _parse(data)
        if chunk.get("error"):
            raise KvrayError(f"the stream ended with an error: {_message(chunk['error'])}")
        if chunk.get("choices"):
            self._add(str(chunk["choices"][0].get("text") or ""), at_s)
        self._usage = chunk.get("usage") or self._usage
        self._timings = chunk.get("timings") or self._timings

    def answer(self, end_s: float) -> TimedAnswer:
        if self._first is None:
            raise KvrayError("the stream ended without any text")
        return TimedAnswer(
            text="".join(self._texts),
            first_s=self._first,
            last_s=self._last,
            end_s=end_s,
            prompt_tokens=int(self._usage.get("prompt_tokens") or 0),
            answer_tokens=self._answer_tokens(),
            cached_tokens=self._cached_tokens(),
        )

    def _add(self, text: str, at_s: float) -> None:
        if text:
            self._texts.append(text)
            self._first = at_s if self._first is None else self._first
        self._last = at_s

    def _answer_tokens(self) -> int:
        count = self._usage.get("completion_tokens") or self._timings.get("predicted_n") or len(self._texts)
        return int(count)

    def _cached_tokens(self) -> int | None:
        details = self._usage.get("prompt_tokens_details") or {}
        count = details.get("cached_tokens")
        count = self._timings.get("cache_n") if count is None else count
        return None if count is None else int(count)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise KvrayError(f"the stream has a line that is no JSON object: {data[:80]!r}")
    return chunk


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]
