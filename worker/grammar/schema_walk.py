"""Walk over a JSON Schema: where in it is something wrong?

Owns: the positions of schemas inside a schema, named by JSON pointers.
Does not: compile; it asks a function that says what is wrong with a schema.
Invariants: property names and data (enum, const, default, examples) are never taken for schemas; the search asks at
most `MAX_QUESTIONS` times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

MAX_QUESTIONS = 400
_DEFINITIONS = ("$defs", "definitions")
_BY_NAME = (*_DEFINITIONS, "properties", "patternProperties")
_BY_INDEX = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems")


def children(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas directly inside `schema`, each with its pointer from there; definitions first."""
    for keyword in (*_BY_NAME, *_BY_INDEX):
        value = schema.get(keyword)
        named: Any = ()
        if isinstance(value, dict) and keyword in _BY_NAME:
            named = value.items()
        elif isinstance(value, list) and keyword in _BY_INDEX:
            named = enumerate(value)
        for name, child in named:
            if isinstance(child, dict):
                yield f"/{keyword}/{_escape(str(name))}", child
    for keyword in _SINGLE:
        if isinstance(schema.get(keyword), dict):
            yield f"/{keyword}", schema[keyword]


def walk(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """`schema` and all schemas inside it, with their pointers."""
    waiting = [("", schema)]
    while waiting:
        pointer, current = waiting.pop()
        yield pointer, current
        waiting.extend((pointer + step, child) for step, child in children(current))


def locate(schema: Schema, fault: Callable[[Schema], str]) -> str:
    """Pointer of the smallest schema inside `schema` that has its fault; "" is the schema itself."""
    message = fault(schema)
    if not message:
        return ""
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    questions, pointer, inner = 0, "", iter(children(schema))
    while (entry := next(inner, None)) is not None and questions < MAX_QUESTIONS:
        questions += 1
        step, child = entry
        if fault({**definitions, **child}) == message:
            pointer += step
            inner = iter(children(child))
    return pointer


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
