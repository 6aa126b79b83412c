"""Constraints in OpenAI bodies: the fields that say what an answer must look like.

    response_format       OpenAI's: {"type": "text" | "json_object" | "json_schema", ...}
    structured_outputs    vLLM's: {"json" | "regex" | "choice" | "grammar" | "json_object": ...}
    guided_json, guided_regex, guided_choice, guided_grammar    the same, as vLLM had it before

Owns: reading all of them into one Constraint.
Does not: know whole bodies (http_schema), bounds (Constraint) or whether a constraint can be compiled (the replica).
Invariants: at most one constraint per body; an option that would change the answer and is not known is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cluster.core.constraint import Constraint
from cluster.core.errors import InvalidRequest

_FORMATS = ("text", "json_object", "json_schema")


def constraint_of(response_format: Any, structured_outputs: Any, guided: Mapping[str, Any]) -> Constraint | None:
    """guided: the older fields under their own names. What is None is not there."""
    fields: dict[str, Any] = {"response_format": response_format, "structured_outputs": structured_outputs, **guided}
    chosen, found = "", None
    for field, constraint in _read(fields):
        if found is not None:
            raise InvalidRequest(field, f"{field}: an answer has one constraint, and {chosen} is one already")
        chosen, found = field, constraint
    return found


def _read(fields: Mapping[str, Any]) -> Iterator[tuple[str, Constraint]]:
    """Every constraint, under the path of the field that holds it."""
    for field, value in fields.items():
        if value is None:
            continue
        if field == "response_format":
            constraint = _of_format(value)
            if constraint is not None:
                yield field, constraint
        elif field == "structured_outputs":
            yield from _of_outputs(field, value)
        else:
            yield field, _KINDS[field.removeprefix("guided_")](field, value)


def _of_format(value: Any) -> Constraint | None:
    kind = _object("response_format", value).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint.json_object()
    if kind != "json_schema":
        raise InvalidRequest("response_format.type", f"response_format.type must be one of {', '.join(_FORMATS)}")
    path = "response_format.json_schema"
    inner = _object(path, value.get("json_schema"))
    if inner.get("schema") is None:
        raise InvalidRequest(f"{path}.schema", f"{path}.schema is missing")
    if not isinstance(inner.get("strict", True), bool | None):
        raise InvalidRequest(f"{path}.strict", f"{path}.strict must be true or false")
    return Constraint.json_schema(_object(f"{path}.schema", inner["schema"]))


def _of_outputs(field: str, value: Any) -> Iterator[tuple[str, Constraint]]:
    there = {name: part for name, part in _object(field, value).items() if part is not None and part is not False}
    for name, part in there.items():
        if name not in _KINDS:
            raise InvalidRequest(f"{field}.{name}", f"{field}.{name} is not supported")
        yield f"{field}.{name}", _KINDS[name](f"{field}.{name}", part)
    if not there:
        raise InvalidRequest(field, f"{field} must have one of {', '.join(_KINDS)}")


def _schema(path: str, value: Any) -> Constraint:
    if not isinstance(value, dict | str):
        raise InvalidRequest(path, f"{path} must be a JSON Schema: an object, or its text")
    return Constraint.json_schema(value)


def _choice(path: str, value: Any) -> Constraint:
    if not isinstance(value, list):
        raise InvalidRequest(path, f"{path} must be a list of strings")
    return Constraint.choice(value)


def _json_object(path: str, value: Any) -> Constraint:
    if value is not True:
        raise InvalidRequest(path, f"{path} must be true or false")
    return Constraint.json_object()


def _object(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(path, f"{path} must be an object")
    return value


def _string(path: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(path, f"{path} must be a string")
    return value


_KINDS: dict[str, Callable[[str, Any], Constraint]] = {
    "json": _schema,
    "regex": lambda path, value: Constraint.regex(_string(path, value)),
    "choice": _choice,
    "grammar": lambda path, value: Constraint.grammar(_string(path, value)),
    "json_object": _json_object,
}
