"""Log probabilities in the two forms that OpenAI's endpoints have, and the prompt's in vLLM's.

Owns: the JSON shapes, and how a token's bytes are written as text.
Does not: compute anything or know events.
Invariants: every number is one that JSON has; a token that is no whole text is written as its bytes, so that two
different ones stay apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.generation import LogprobEntry

Json = dict[str, Any]

_LEAST = -9999.0  # stands for minus infinity, as in OpenAI's API


def chat_logprobs(entries: Sequence[LogprobEntry], _offsets: Sequence[int]) -> Json:
    content = [_chat_token(entry) | {"top_logprobs": [_chat_token(other) for other in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[LogprobEntry], offsets: Sequence[int]) -> Json:
    return {
        "tokens": [token_text(entry.piece) for entry in entries],
        "token_logprobs": [_number(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry.logprob is None else _by_text((*entry.top, entry)) for entry in entries],
        "text_offset": list(offsets),
    }


def prompt_logprobs(entries: Sequence[LogprobEntry]) -> list[Json | None]:
    return [
        None
        if entry.logprob is None
        else {
            str(other.token_id): {"logprob": _number(other.logprob), "decoded_token": token_text(other.piece)}
            for other in (*entry.top, entry)
        }
        for entry in entries
    ]


def token_text(piece: bytes) -> str:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _chat_token(entry: LogprobEntry) -> Json:
    return {"token": token_text(entry.piece), "logprob": _number(entry.logprob), "bytes": list(entry.piece)}


def _by_text(entries: Sequence[LogprobEntry]) -> Json:
    """The likeliest of those that are written alike; OpenAI's form has no room for the others."""
    found: Json = {}
    for entry in entries:
        found.setdefault(token_text(entry.piece), _number(entry.logprob))
    return found


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST)
