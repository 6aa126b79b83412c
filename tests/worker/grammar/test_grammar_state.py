"""GrammarState: replay and fork equal a live state; the end is where the grammar says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.core.constraint import Constraint
from cluster.core.errors import InvalidRequest, KvrayError

SCHEMAS: dict[str, Any] = json.loads(Path(__file__).with_name("schemas.json").read_text())
CASES = {
    "schema": Constraint.json_schema(SCHEMAS["tool call"]),
    "recursive": Constraint.json_schema(SCHEMAS["recursive ref"]),
    "object": Constraint.json_object(),
    "regex": Constraint.regex("(ab|cd){3,9}[0-9]*"),
    "choice": Constraint.choice(["one", "only", "once more"]),
    "grammar": Constraint.grammar('start: item ("," item)*\nitem: /[a-z]{1,5}/ | "(" start ")"'),
}


@pytest.mark.parametrize("name", CASES)
def test_replay_equals_the_live_state_at_every_position(world: Any, name: str) -> None:
    grammar = world.compiler.compile(CASES[name])
    for seed in range(3):
        tokens = world.sample(grammar, seed)[0][:80]
        live, rebuilt = grammar.start(), grammar.start()
        for position in range(len(tokens) + 1):
            rebuilt.replay(tokens[:position])
            assert (world.mask(live) == world.mask(rebuilt)).all()
            assert (live.can_end, live.is_finished, live.num_tokens) == (
                rebuilt.can_end,
                rebuilt.is_finished,
                rebuilt.num_tokens,
            )
            if position < len(tokens):
                live.accept(tokens[position])


@pytest.mark.parametrize("name", CASES)
def test_a_fork_and_its_parent_do_not_disturb_each_other(world: Any, name: str) -> None:
    grammar = world.compiler.compile(CASES[name])
    runs = [world.sample(grammar, seed)[0][:40] for seed in range(6)]
    for first in runs[:3]:
        half = len(first) // 2
        parent = grammar.start()
        parent.replay(first[:half])
        before = world.mask(parent)
        fork = parent.fork()
        assert (world.mask(fork) == before).all()
        for token in first[half:]:
            fork.accept(token)
            world.mask(fork)
        assert (world.mask(parent) == before).all()
        alone = grammar.start()
        alone.replay(first)
        assert (world.mask(fork) == world.mask(alone)).all()
        for token in first[half:]:
            parent.accept(token)
        assert (world.mask(parent) == world.mask(fork)).all()


def test_states_of_one_grammar_are_independent(small_world: Any) -> None:
    grammar = small_world.compiler.compile(CASES["choice"])
    one, other = grammar.start(), grammar.start()
    one.accept(int(small_world.allowed(one)[0]))
    assert (one.num_tokens, other.num_tokens) == (1, 0)
    assert (small_world.mask(other) == small_world.mask(grammar.start())).all()


def test_the_end(small_world: Any) -> None:
    state = small_world.compiler.compile(Constraint.regex("ab?")).start()
    a, b = (small_world.tokenizer.token_to_id(text) for text in "ab")
    assert not np.isin(small_world.eos, small_world.allowed(state)).any()
    state.accept(a)
    assert sorted(small_world.allowed(state)) == sorted([*small_world.eos, b])
    assert (state.can_end, state.is_finished) == (True, False)
    ended = state.fork()
    ended.accept(1)
    assert (ended.can_end, ended.is_finished) == (True, True)
    assert list(small_world.allowed(ended)) == list(small_world.eos)
    state.accept(b)
    assert (state.can_end, state.is_finished) == (True, True)
    assert list(small_world.allowed(state)) == list(small_world.eos)


def test_a_token_that_is_not_allowed(small_world: Any) -> None:
    grammar = small_world.compiler.compile(Constraint.regex("ab"))
    a = small_world.tokenizer.token_to_id("a")
    for wrong in (a + 1, small_world.eos[0], small_world.vocab_size - 1):
        with pytest.raises(KvrayError, match=rf"token {wrong} at 0 is not allowed by the regex"):
            grammar.start().accept(wrong)
    with pytest.raises(KvrayError, match="the tokens so far"):
        grammar.start().replay([a, a])


def test_a_grammar_cannot_allow_an_end_inside_or_ids_without_a_token(small_world: Any) -> None:
    a = small_world.tokenizer.token_to_id("a")
    state = small_world.compiler.compile(Constraint.grammar('start: "aaaaa" <|end|> "b"')).start()
    state.replay([a] * 5)
    with pytest.raises(InvalidRequest, match="no token can follow"):
        small_world.mask(state)
    anything = small_world.compiler.compile(Constraint.grammar("start: <[*]>")).start()
    real = small_world.tokenizer.get_vocab_size()
    assert list(small_world.allowed(anything)) == [i for i in range(real) if i not in small_world.eos]


def test_a_grammar_that_gets_too_complex_ends_with_an_error(small_world: Any) -> None:
    """The mask is an error then, never an early end."""
    state = small_world.compiler.compile(Constraint.regex("b{5}" + "a?" * 2000)).start()
    a, b = (small_world.tokenizer.token_to_id(text) for text in "ab")
    state.replay([b] * 4)
    state.accept(b)
    with pytest.raises(InvalidRequest, match="regex cannot be followed after"):
        for _ in range(2000):
            small_world.mask(state)
            state.accept(a)
