"""Regexes, choices and grammars: what ends matches."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cluster.core.constraint import Constraint

REGEXES = [
    "[a-c]{2,4}",
    "(yes|no)!?",
    "^(19|20)[0-9]{2}-[01][0-9]$",
    r"\+?[0-9]{3}(-[0-9]{2})+",
    "(?i)kvray",
    "é|日本|[^a-z]{1,3}",
    r"\$[0-9]+\.[0-9]{2}",
    "(a|b)*c",
    "a*",
    "[A-Z][a-z]{0,9}( [A-Z][a-z]{0,9}){0,2}",
]
CHOICES = [
    ["yes", "no"],
    ["a", "ab", "abc"],
    ["positive", "negative", "neutral", "not sure"],
    ["a|b", "(x)", "[y]", "\\d", "^$", "line\nbreak", 'quo"te', "日本", " blank ", "#1"],
]
EXPRESSION = """
start: sum
sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,2}/
"""
SQL = """
start: "SELECT " columns " FROM " NAME (" WHERE " NAME " = " VALUE)?
columns: "*" | NAME ("," NAME)*
NAME: /[a-z]{1,8}/
VALUE: /[0-9]{1,4}/
"""


@pytest.mark.parametrize("pattern", REGEXES)
def test_a_text_matches_the_regex_as_a_whole(world: Any, pattern: str) -> None:
    grammar = world.compiler.compile(Constraint.regex(pattern))
    assert all(re.fullmatch(pattern, text) for text in world.texts(grammar, 20))


@pytest.mark.parametrize("strings", CHOICES)
def test_a_text_is_one_of_the_choices_and_each_is_possible(world: Any, strings: list[str]) -> None:
    grammar = world.compiler.compile(Constraint.choice(strings))
    assert set(world.texts(grammar, 40)) <= set(strings)
    for text in strings:
        state = grammar.start()
        state.replay(world.tokenizer.encode(text, add_special_tokens=False).ids)
        assert state.can_end


def test_expressions(world: Any) -> None:
    grammar = world.compiler.compile(Constraint.grammar(EXPRESSION))
    ended = [world.text(tokens) for tokens, end in (world.sample(grammar, seed) for seed in range(40)) if end]
    assert len(ended) >= 10
    for text in ended:
        assert re.fullmatch(r"[0-9+\-*/()]+", text)
        compile(text, "<expression>", "eval")


def test_statements(world: Any) -> None:
    grammar = world.compiler.compile(Constraint.grammar(SQL))
    pattern = r"SELECT (\*|[a-z]{1,8}(,[a-z]{1,8})*) FROM [a-z]{1,8}( WHERE [a-z]{1,8} = [0-9]{1,4})?"
    assert all(re.fullmatch(pattern, text) for text in world.texts(grammar, 30))
