"""Stop strings as a client of the front door sees them, streamed token by token."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from fake_dispatcher import Attempt, DoorWorld
from tokenizers import decoders, models, pre_tokenizers

from cluster.chat_template import ChatTemplate
from cluster.core.request import FinishReason, TokenDelta
from cluster.tokenizer import Tokenizer
from router.generation import GenerationCall, GenerationEvent

PIECES = ["DEF", "G", "HI", "J", "abDE", "FGH", "IJxy", "X", "c", " "]


def piece_tokenizer() -> Tokenizer:
    """Whole pieces are tokens, and texts are their pieces without anything between."""
    backend = tokenizers.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="c"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, ChatTemplate(None, {}))


async def answer(pieces: list[str], prompt: str = "c", **sampling: Any) -> tuple[list[GenerationEvent], DoorWorld]:
    ids = [PIECES.index(piece) for piece in pieces]
    deltas = [TokenDelta(request_id="r", token_ids=(token,)) for token in ids[:-1]]
    deltas.append(TokenDelta(request_id="r", token_ids=(ids[-1],), finish_reason=FinishReason.LENGTH))
    world = DoorWorld([Attempt("a", list(deltas))], tokenizer=piece_tokenizer())
    return [event async for event in world.door.generate(GenerationCall(text=prompt, sampling=sampling))], world


def text(events: list[GenerationEvent]) -> str:
    return "".join(event.text for event in events)


async def test_scenario_21_a_stop_string_across_tokens() -> None:
    """DEFGHIJ comes as DEF, G, HI, J: none of it is sent, and the answer ends with the token that completes it."""
    events, world = await answer(["c", "DEF", "G", "HI", "J", "X", "X"], stop=["DEFGHIJ"])
    assert [event.text for event in events] == ["c", "", "", "", ""]
    assert [event.finish_reason for event in events] == [None] * 4 + [FinishReason.STOP]
    assert events[-1].usage.completion_tokens == 5
    assert world.attempts[0].sent == 5 and world.attempts[0].ending == "closed"

    false_start, _ = await answer(["c", "DEF", "X", "c"], stop=["DEFGHIJ"])
    assert [event.text for event in false_start] == ["c", "", "DEFX", "c"]
    assert false_start[-1].finish_reason is FinishReason.LENGTH

    within_tokens, _ = await answer(["abDE", "FGH", "IJxy"], stop=["DEFGHIJ"])
    assert text(within_tokens) == "ab" and within_tokens[-1].usage.completion_tokens == 3

    behind_the_prompt, _ = await answer(["G", "HI", "J", "c"], prompt="c DEF", stop=["DEFGHIJ"])
    assert text(behind_the_prompt) == "GHIJc"

    for stops in (["HI", "FG"], ["FG", "HI"]):
        two, _ = await answer(["abDE", "FGH", "IJxy"], stop=stops)
        assert text(two) == "abDE" and two[-1].usage.completion_tokens == 2

    with_stop, _ = await answer(["abDE", "FGH", "IJxy"], stop=["DEFGHIJ"], include_stop_str_in_output=True)
    assert text(with_stop) == "abDEFGHIJ" and with_stop[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("min_tokens", "wanted"), [(0, ""), (1, ""), (2, "DEFGX"), (4, "DEFGX"), (5, "DEFGXDEFG"), (9, "DEFGXDEFG")]
)
async def test_a_stop_string_in_the_first_min_tokens_is_text(min_tokens: int, wanted: str) -> None:
    events, _ = await answer(["DEF", "G", "X", "DEF", "G"], stop=["DEFG"], min_tokens=min_tokens)
    assert text(events) == wanted
