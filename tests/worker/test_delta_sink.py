"""CollectingSink: fewer deltas with the same tokens, per choice, and the last one last."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cluster.core.errors import ReplicaLost
from cluster.core.logprobs import TokenLogprob
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


def test_log_probabilities_stay_with_their_tokens() -> None:
    out = ListSink()
    sink = CollectingSink(out, tokens=100)
    for token in range(6):
        ending: dict[str, Any] = {"finish_reason": LENGTH} if token == 5 else {}
        prompt: dict[str, Any] = {"prompt_logprobs": (None, TokenLogprob(-9.0))} if token == 0 else {}
        logprobs = (TokenLogprob(-float(token), ((token, -0.5),)),)
        sink.put(TokenDelta(request_id="r", token_ids=(token,), logprobs=logprobs, **ending, **prompt))
    assert [d.token_ids for d in out.deltas] == [(0,), (1, 2, 3, 4, 5)]
    assert [[one.logprob for one in d.logprobs or ()] for d in out.deltas] == [[0.0], [-1.0, -2.0, -3.0, -4.0, -5.0]]
    assert [d.prompt_logprobs for d in out.deltas] == [(None, TokenLogprob(-9.0)), None]
    whole = ListSink()
    waiting = CollectingSink(whole, tokens=100)
    waiting.put(TokenDelta(request_id="r", token_ids=(8,), choice=1))
    for delta_ in out.deltas:
        waiting.put(delta_)
    assert [d.token_ids for d in whole.deltas if d.choice == 0] == [(0, 1, 2, 3, 4, 5)]
    assert whole.deltas[-1].prompt_logprobs == (None, TokenLogprob(-9.0))
    assert len(whole.deltas[-1].logprobs or ()) == 6


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
