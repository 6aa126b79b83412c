"""JSON Schemas: whatever is sampled under the mask, a text that ends is valid JSON and valid by its schema."""

from __future__ import annotations

import json
from datetime import date, datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cluster.core.constraint import Constraint

SCHEMAS: dict[str, Any] = json.loads(Path(__file__).with_name("schemas.json").read_text())
SAMPLES = 12


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_ends_is_valid(world: Any, name: str) -> None:
    grammar = world.compiler.compile(Constraint.json_schema(SCHEMAS[name]))
    validator = jsonschema.Draft202012Validator(
        SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for text in world.texts(grammar, SAMPLES):
        validator.validate(json.loads(text))


def test_any_object(world: Any) -> None:
    grammar = world.compiler.compile(Constraint.json_object())
    assert all(isinstance(json.loads(text), dict) for text in world.texts(grammar, 40))


def test_dates_exist(world: Any) -> None:
    """jsonschema does not look at times without another package."""
    grammar = world.compiler.compile(Constraint.json_schema(SCHEMAS["dates and times"]))
    for text in world.texts(grammar, SAMPLES):
        value = json.loads(text)
        date.fromisoformat(value["day"])
        datetime.fromisoformat(value["at"].upper().replace(":60", ":59"))  # a leap second


def test_whitespace_is_bounded(world: Any) -> None:
    state = world.compiler.compile(Constraint.json_object()).start()
    for token in world.tokenizer.encode("{\n  ").ids:
        state.accept(token)
    newline = world.tokenizer.encode("\n", add_special_tokens=False).ids
    assert newline[0] not in world.allowed(state)


@pytest.mark.parametrize(
    "text", ['{"a": 1}', '{\n  "a": [\n    1,\n    2\n  ]\n}', '{\n\t"a": {}\n}', '{"a":{"b":"\\n"}}']
)
def test_common_layouts_are_allowed(world: Any, text: str) -> None:
    state = world.compiler.compile(Constraint.json_object()).start()
    state.replay(world.tokenizer.encode(text, add_special_tokens=False).ids)
    assert state.is_finished
