"""ChunkWriter writes to the byte what the plain way would write."""

from __future__ import annotations

import pytest

from cluster.core.replica import WorkerId
from cluster.core.request import FinishReason
from router.chunk_writer import ChunkWriter
from router.generation import GenerationEvent, Usage
from router.http_replies import CHAT, COMPLETION, Reply, ReplyShape
from router.sse import DONE, frame

USAGE = Usage(prompt_tokens=5, completion_tokens=4, cached_tokens=3)
TEXTS = ["a", "", " \n\t", '"quoted" \\ and / {}', "\u2028 é 🎉 \x00 \x7f", "data: x\n\n", "%s {0}"]


def event(text: str, index: int = 0, reason: FinishReason | None = None, score: float | None = None) -> GenerationEvent:
    return GenerationEvent(
        text=text,
        token_ids=(1,),
        usage=USAGE,
        replica=WorkerId("w"),
        finish_reason=reason,
        index=index,
        score=score,
    )


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("shape", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_frames_are_those_of_the_objects(shape: ReplyShape, include_usage: bool) -> None:
    reply = Reply(shape, model='a "model"', created=1, num_choices=2)
    writer = ChunkWriter(reply, include_usage=include_usage)
    nothing = {"usage": None} if include_usage else {}
    events = [event(text, index) for text in TEXTS for index in (0, 1)]
    events += [
        event("end", 0, FinishReason.STOP),
        event("beam", 1, FinishReason.LENGTH, -0.5),
        event("s", 1, None, 0.5),
    ]
    for each in events:
        assert writer.chunk(each) == frame(reply.chunk(each) | nothing)
    assert writer.opening() == [frame(chunk | nothing) for chunk in reply.first_chunks()]
    usage = [frame(reply.usage_chunk(USAGE))] if include_usage else []
    assert writer.closing(USAGE) == [*usage, DONE]
