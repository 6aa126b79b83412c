"""Constraints in OpenAI bodies: every form of both endpoints, and every refusal by the field's path."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.core.constraint import Constraint
from cluster.core.errors import InvalidRequest
from router.http_schema import ChatBody, CompletionBody, parse

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"é": {"type": "string"}}}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


def constraints(fields: dict[str, Any]) -> list[Constraint | None]:
    """By both endpoints."""
    chat = {"messages": [{"role": "user", "content": "hi"}], **fields}
    completion = {"prompt": "hi", **fields}
    return [
        parse(ChatBody, json.dumps(chat).encode()).call().constraint,
        parse(CompletionBody, json.dumps(completion).encode()).call().constraint,
    ]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None, "guided_json": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint.json_object()),
        ({"response_format": FORMAT}, Constraint.json_schema(SCHEMA)),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, Constraint.json_schema({})),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, Constraint.regex("a")),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Constraint.json_schema(json.dumps(SCHEMA))),
        ({"structured_outputs": {"regex": "a+", "json": None, "json_object": False}}, Constraint.regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Constraint.choice(["a", "b"])),
        ({"structured_outputs": {"grammar": "start: /a/"}}, Constraint.grammar("start: /a/")),
        ({"structured_outputs": {"json_object": True}}, Constraint.json_object()),
        ({"structured_outputs": {"regex": "a", "disable_fallback": False}}, Constraint.regex("a")),
        ({"guided_json": SCHEMA}, Constraint.json_schema(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, Constraint.json_schema(json.dumps(SCHEMA))),
        ({"guided_regex": "a+"}, Constraint.regex("a+")),
        ({"guided_choice": ["a", "b"]}, Constraint.choice(["a", "b"])),
        ({"guided_grammar": "start: /a/"}, Constraint.grammar("start: /a/")),
    ],
    ids=lambda value: str(value)[:60],
)
def test_every_form_arrives(fields: dict[str, Any], wanted: Constraint | None) -> None:
    assert constraints(fields) == [wanted, wanted]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
            "response_format.json_schema.strict",
        ),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": []}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_json": []}, "guided_json"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_json_object": True}, "guided_json_object"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_json": "{"}, "json_schema"),
        ({"guided_json": "[]"}, "json_schema"),
        ({"guided_regex": ""}, "regex"),
        ({"guided_choice": []}, "choice"),
        ({"guided_choice": ["a", 1]}, "choice"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        constraints(fields)
    assert caught.value.field == param
    assert param in caught.value.message


def test_bad_json_says_where() -> None:
    with pytest.raises(InvalidRequest, match="at line 2, column 1"):
        constraints({"guided_json": '{"type":\n "object",}'})
