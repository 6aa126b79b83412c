"""What the OpenAI endpoints answer: events to JSON objects.

Owns: the reply and chunk shapes of /v1/completions and /v1/chat/completions, and their ids.
Does not: send them (router.http_api, router.sse).
Invariants: whole replies and the usage chunk always carry `prompt_tokens_details.cached_tokens`; all chunks of an
answer have the same id and creation time; a chat stream begins with the assistant's role.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from router.generation import GenerationEvent, LogprobEntry, Usage
from router.http_logprobs import chat_logprobs, completion_logprobs, prompt_logprobs

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyShape:
    """What differs between the endpoints. opening: the choice of a stream's first chunk, if it has one of its own.

    prompt_in_choice: a prompt's log probabilities stand in the choice, else beside the choices.
    """

    id_prefix: str
    whole_object: str
    chunk_object: str
    whole_choice: Callable[[str], Json]
    chunk_choice: Callable[[str], Json]
    logprobs: Callable[[Sequence[LogprobEntry], Sequence[int]], Json]
    prompt_in_choice: bool
    opening: Json | None = None


COMPLETION = ReplyShape(
    id_prefix="cmpl",
    whole_object="text_completion",
    chunk_object="text_completion",
    whole_choice=lambda text: {"text": text},
    chunk_choice=lambda text: {"text": text},
    logprobs=completion_logprobs,
    prompt_in_choice=True,
)

CHAT = ReplyShape(
    id_prefix="chatcmpl",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    whole_choice=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    chunk_choice=lambda text: {"delta": {"content": text} if text else {}},
    logprobs=chat_logprobs,
    prompt_in_choice=False,
    opening={"delta": {"role": "assistant", "content": ""}},
)


class Reply:
    """The objects of one answer. `num_choices`: how many choices a stream opens."""

    def __init__(self, shape: ReplyShape, *, model: str, created: int, num_choices: int = 1) -> None:
        self._shape = shape
        self._num_choices = num_choices
        self._head: Json = {"id": f"{shape.id_prefix}-{uuid.uuid4().hex}", "created": created, "model": model}

    @property
    def id(self) -> str:
        """What the client knows the answer by."""
        return str(self._head["id"])

    def whole(self, events: Sequence[GenerationEvent]) -> Json:
        """The answer in one object."""
        by_index: dict[int, list[GenerationEvent]] = {}
        for event in events:
            by_index.setdefault(event.index, []).append(event)
        choices = [
            self._choice(self._shape.whole_choice("".join(event.text for event in part)), part)
            for _, part in sorted(by_index.items())
        ]
        whole = self._object(self._shape.whole_object, choices) | {"usage": usage_object(events[-1].usage)}
        return whole | self._prompt_logprobs(events, in_choice=False)

    def first_chunks(self) -> list[Json]:
        """What a stream begins with, before any text."""
        opening = self._shape.opening
        if opening is None:
            return []
        return [self._object(self._shape.chunk_object, [_opened(opening, index)]) for index in range(self._num_choices)]

    def chunk(self, event: GenerationEvent) -> Json:
        choice = self._choice(self._shape.chunk_choice(event.text), [event])
        return self._object(self._shape.chunk_object, [choice]) | self._prompt_logprobs([event], in_choice=False)

    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk of a stream whose client asked for the usage."""
        return self._object(self._shape.chunk_object, []) | {"usage": usage_object(usage)}

    def _choice(self, content: Json, events: Sequence[GenerationEvent]) -> Json:
        """`events` are those of one choice. score and prompt_logprobs are there only where they are known."""
        last = events[-1]
        choice = _opened(content, last.index) | {"finish_reason": last.finish_reason}
        if any(event.logprobs is not None for event in events):
            entries = [entry for event in events for entry in event.logprobs or ()]
            offsets = [offset for event in events for offset in event.text_offsets]
            choice["logprobs"] = self._shape.logprobs(entries, offsets)
        choice |= self._prompt_logprobs(events, in_choice=True)
        return choice if last.score is None else choice | {"score": last.score}

    def _prompt_logprobs(self, events: Sequence[GenerationEvent], *, in_choice: bool) -> Json:
        if self._shape.prompt_in_choice is not in_choice:
            return {}
        told = [event.prompt_logprobs for event in events if event.prompt_logprobs is not None]
        return {"prompt_logprobs": prompt_logprobs(told[0])} if told else {}

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return self._head | {"object": kind, "choices": choices}


def _opened(content: Json, index: int) -> Json:
    return {"index": index, **content, "logprobs": None, "finish_reason": None}


def usage_object(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
