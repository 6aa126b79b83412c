"""Constraint: every wrong value names its kind, and the wire loses nothing."""

from __future__ import annotations

import json

import pytest

from cluster.core.constraint import MAX_CHOICE_STRINGS, MAX_TEXT_BYTES, Constraint, ConstraintKind
from cluster.core.errors import InvalidRequest

GOOD = [
    Constraint.json_object(),
    Constraint.json_schema({"type": "string", "const": "é"}),
    Constraint.json_schema('{"type": "object"}'),
    Constraint.regex("[a-z]+"),
    Constraint.choice(["yes", "no", "日本"]),
    Constraint.grammar('start: "a"'),
]


@pytest.mark.parametrize("constraint", GOOD, ids=lambda c: c.kind)
def test_the_wire_loses_nothing(constraint: Constraint) -> None:
    assert Constraint.from_wire(json.loads(json.dumps(constraint.to_wire()))) == constraint
    assert hash(Constraint.from_wire(constraint.to_wire())) == hash(constraint)


@pytest.mark.parametrize(
    ("kind", "text", "part"),
    [
        ("json_object", "{}", "at most 0"),
        ("json_schema", "", "empty"),
        ("json_schema", '{"a": 1,\n "b" 2}', "line 2, column 6"),
        ("json_schema", "[]", "a JSON object"),
        ("json_schema", "true", "a JSON object"),
        ("json_schema", '{"maximum": NaN}', "NaN"),
        ("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000, "nested too deeply"),
        ("json_schema", '{"maximum": ' + "9" * 5000 + "}", "valid JSON"),
        ("json_schema", '{"const": "' + "x" * MAX_TEXT_BYTES[ConstraintKind.JSON_SCHEMA] + '"}', "at most 131072"),
        ("regex", "", "empty"),
        ("regex", "é" * 2049, "has 4098 bytes"),
        ("regex", "\ud800", "valid Unicode"),
        ("choice", "[]", "at least one"),
        ("choice", '"abc"', "a list"),
        ("choice", '["a", ""]', "not empty"),
        ("choice", '["a", 1]', "a string"),
        ("choice", json.dumps(["a"] * (MAX_CHOICE_STRINGS + 1)), "at most 1024"),
        ("grammar", "x" * 65537, "at most 65536"),
    ],
)
def test_a_wrong_text_names_its_kind(kind: str, text: str, part: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Constraint(kind=ConstraintKind(kind), text=text)
    assert caught.value.field == kind
    assert part in caught.value.message


@pytest.mark.parametrize("strings", [[], "abc", [1], ["a", ""], ["a"] * (MAX_CHOICE_STRINGS + 1)])
def test_wrong_choices(strings: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Constraint.choice(strings)
    assert caught.value.field == "choice"


def test_a_wrong_kind_and_a_text_that_is_none() -> None:
    with pytest.raises(InvalidRequest, match="one of json_object"):
        Constraint(kind="xml", text="x")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="must be a string"):
        Constraint(kind=ConstraintKind.REGEX, text=None)  # type: ignore[arg-type]
