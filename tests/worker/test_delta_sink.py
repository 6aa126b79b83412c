"""CollectingSink: fewer deltas with the same tokens, per choice, and the last one last."""

from __future__ import annotations

import random

import pytest

from cluster.core.errors import ReplicaLost
from cluster.core.request import FinishReason, TokenDelta
from worker.delta_sink import CollectingSink

LENGTH = FinishReason.LENGTH


class ListSink:
    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.closed = False

    def put(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)

    async def ended(self) -> None:
        return

    def close(self) -> None:
        self.closed = True


def delta(*tokens: int, choice: int = 0, last: bool = False, more: bool = False) -> TokenDelta:
    reason = LENGTH if last else None
    return TokenDelta(request_id="r", token_ids=tokens, finish_reason=reason, choice=choice, more=more)


def test_the_first_delta_passes_at_once_and_keeps_its_facts() -> None:
    out = ListSink()
    sink = CollectingSink(out, tokens=4)
    first = TokenDelta(request_id="r", token_ids=(1,), cached_tokens=9)
    sink.put(first)
    assert out.deltas == [first]
    for token in range(2, 7):
        sink.put(delta(token))
    sink.put(delta(7, last=True))
    assert [d.token_ids for d in out.deltas] == [(1,), (2, 3, 4, 5), (6, 7)]
    assert [d.last for d in out.deltas] == [False, False, True]


@pytest.mark.parametrize("seed", range(20))
def test_choices_keep_their_tokens_and_ends(seed: int) -> None:
    rng = random.Random(seed)
    lengths = {choice: rng.randrange(1, 40) for choice in range(4)}
    wanted = {choice: list(range(length)) for choice, length in lengths.items()}
    out = ListSink()
    sink = CollectingSink(out, tokens=rng.randrange(1, 20))
    given = dict.fromkeys(lengths, 0)
    while given:
        choice = rng.choice(list(given))
        token = given[choice]
        given[choice] += 1
        ends = given[choice] == lengths[choice]
        if ends:
            del given[choice]
        sink.put(delta(token, choice=choice, last=ends, more=ends and bool(given)))
    assert [d.last for d in out.deltas[:-1]] == [False] * (len(out.deltas) - 1)
    assert out.deltas[-1].last
    for choice, tokens in wanted.items():
        mine = [d for d in out.deltas if d.choice == choice]
        assert [token for d in mine for token in d.token_ids] == tokens
        assert [d.finish_reason for d in mine] == [None] * (len(mine) - 1) + [LENGTH]


def test_an_error_comes_behind_what_was_collected() -> None:
    out = ListSink()
    sink = CollectingSink(out, tokens=100)
    for token in range(3):
        sink.put(delta(token))
    error = ReplicaLost("gone")
    sink.put(TokenDelta(request_id="r", error=error))
    assert [d.token_ids for d in out.deltas] == [(0,), (1, 2), ()]
    assert out.deltas[-1].error is error


async def test_ending_and_closing_are_those_of_the_inner_sink() -> None:
    out = ListSink()
    sink = CollectingSink(out)
    await sink.ended()
    sink.close()
    assert out.closed
