"""What cannot be compiled is refused, with the place; what is not supported is never ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.core.constraint import Constraint
from cluster.core.errors import InvalidRequest


def refused(world: Any, constraint: Constraint) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        world.compiler.compile(constraint)
    assert caught.value.field == constraint.kind
    assert "verbose" not in caught.value.message
    return caught.value


UNSUPPORTED: list[dict[str, Any]] = [
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"maxLength": 3}},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"const": 1}},
    {"type": "array", "unevaluatedItems": False},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": {"type": "object"}}},
    {"type": "object", "dependencies": {"a": ["b"]}},
    {"type": "string", "format": "semver"},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"$dynamicRef": "#x"},
    {"$ref": "http://localhost/other.json"},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "object", "minProperties": 2},
    {"type": "strin"},
]


@pytest.mark.parametrize("schema", UNSUPPORTED, ids=json.dumps)
def test_an_unsupported_schema_is_refused_where_it_stands(small_world: Any, schema: dict[str, Any]) -> None:
    assert refused(small_world, Constraint.json_schema(schema)).details["at"].startswith("#")
    inner = {"type": "object", "properties": {"ok": {"type": "integer"}, "a/b": {"type": "array", "items": schema}}}
    place = refused(small_world, Constraint.json_schema(inner)).details["at"]
    assert place.startswith("#/properties/a~1b/items")


def test_the_place_is_in_the_definition(small_world: Any) -> None:
    schema = {"$defs": {"bad": {"anyOf": [{"type": "null"}, {"minLength": -1}]}}, "items": {"$ref": "#/$defs/bad"}}
    assert refused(small_world, Constraint.json_schema(schema)).details["at"] == "#/$defs/bad/anyOf/1"


def test_data_and_names_are_no_schemas(small_world: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"const": {"minProperties": 9}}, "uniqueItems": {"enum": [{"contains": 1}]}},
        "default": {"minProperties": 7},
    }
    small_world.compiler.compile(Constraint.json_schema(schema))


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"properties": []}, "must be an object"),
        ({"type": "object", "required": "x"}, "required"),
        ({"maxLength": "3"}, "maxLength"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
        ({"enum": []}, "empty"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"$ref": "#"}, "no text matches"),
        ({"type": "string", "pattern": "a("}, "unclosed group"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "options are fixed"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "'a'"),
    ],
)
def test_a_bad_schema_says_what_is_wrong(small_world: Any, schema: dict[str, Any], part: str) -> None:
    assert part in refused(small_world, Constraint.json_schema(schema)).message


@pytest.mark.parametrize("depth", [130, 300, 900, 3000])
def test_deep_schemas(small_world: Any, depth: int) -> None:
    text = '{"items":' * depth + "{}" + "}" * depth
    with pytest.raises(InvalidRequest):
        small_world.compiler.compile(Constraint.json_schema(text))


@pytest.mark.parametrize(
    ("pattern", "place", "part"),
    [
        ("ab(c", "character 3", "unclosed group"),
        ("a{3,1}", "character 2", "range"),
        ("(?=a)b", "character 1", "look-around"),
        (r"(a)\1", "character 4", "backreferences"),
        (r"\bword", "", "not supported"),
        (r"[^\s\S]", "", "no text matches"),
    ],
)
def test_a_bad_regex_says_where(small_world: Any, pattern: str, place: str, part: str) -> None:
    error = refused(small_world, Constraint.regex(pattern))
    assert (error.details["at"], part in error.message) == (place, True), error.message


@pytest.mark.parametrize(
    ("lark", "place", "part"),
    [
        ('start: "a" b\n', "line 1, column 8", "unknown name"),
        ('start: "a"\nfoo: (\n', "line 2, column 7", "Expected"),
        ('foo: "a"', "", "start"),
        ('start: a\na: a "x"', "", "no text matches"),
        ("start: " + "(" * 5000, "line 1", "nested"),
        ('start: <[0]> "x"', "", "no text matches"),
    ],
)
def test_a_bad_grammar_says_where(small_world: Any, lark: str, place: str, part: str) -> None:
    error = refused(small_world, Constraint.grammar(lark))
    assert error.details["at"].startswith(place)
    assert part in error.message


def test_chains_that_overflow_a_usual_stack(small_world: Any) -> None:
    lark = "start:r0\n" + "".join(f"r{i}:r{i + 1}\n" for i in range(5000)) + 'r5000:"a"\n'
    small_world.compiler.compile(Constraint.grammar(lark))
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3500)}
    schema = {"$defs": {**chain, "a3500": {"type": "null"}}, "$ref": "#/$defs/a0"}
    small_world.compiler.compile(Constraint.json_schema(schema))
