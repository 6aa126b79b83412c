"""ChunkWriter: the frames of one streamed answer. A chunk of plain text costs one JSON string, not one JSON object.

Owns: the order of a stream's frames, and the template that all chunks of a choice share.
Does not: know what the objects look like (http_replies) or send anything (sse).
Invariants: every frame is what `frame` makes of the object that `Reply` makes, to the byte.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from typing import Any

from router.generation import GenerationEvent, Usage
from router.http_replies import Reply
from router.sse import DONE, frame

# Stands for the text in a template; random, so that no model's name can contain it.
_MARK = uuid.uuid4().hex
_encode_text = json.JSONEncoder(ensure_ascii=False).encode


class ChunkWriter:
    def __init__(self, reply: Reply, *, include_usage: bool) -> None:
        self._reply = reply
        self._include_usage = include_usage
        # With include_usage OpenAI's chunks have a usage of null until the last.
        self._no_usage: dict[str, Any] = {"usage": None} if include_usage else {}
        self._templates: dict[int, tuple[bytes, bytes]] = {}

    def opening(self) -> list[bytes]:
        """What a stream begins with, before any text."""
        return [frame(chunk | self._no_usage) for chunk in self._reply.first_chunks()]

    def chunk(self, event: GenerationEvent) -> bytes:
        if event.finish_reason is not None or not event.text or _has_more_than_text(event):
            return frame(self._reply.chunk(event) | self._no_usage)
        template = self._templates.get(event.index)
        if template is None:
            template = self._templates[event.index] = self._template(event)
        return _encode_text(event.text).encode("utf-8").join(template)

    def closing(self, usage: Usage) -> list[bytes]:
        """What a stream ends with that did not fail."""
        return [frame(self._reply.usage_chunk(usage)), DONE] if self._include_usage else [DONE]

    def _template(self, event: GenerationEvent) -> tuple[bytes, bytes]:
        """A chunk of the event's choice, cut where its text is."""
        chunk = self._reply.chunk(dataclasses.replace(event, text=_MARK)) | self._no_usage
        before, after = frame(chunk).split(json.dumps(_MARK).encode("ascii"))
        return before, after


def _has_more_than_text(event: GenerationEvent) -> bool:
    return event.score is not None or event.logprobs is not None or event.prompt_logprobs is not None
