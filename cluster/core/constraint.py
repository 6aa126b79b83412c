"""Constraint: what the text of an answer must look like.

Owns: the five kinds, their text and its bounds; a wrong value raises `InvalidRequest` naming the kind as its field.
Does not: know the grammar library; whether a schema, regex or grammar can be compiled is `worker.grammar`'s to say.
Invariants: an instance is within bounds, its text is valid Unicode, and the text of a schema or choice is valid JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cluster.core.errors import InvalidRequest

MAX_CHOICE_STRINGS = 1024


class ConstraintKind(StrEnum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


# A longer text could exhaust the stack of the thread that compiles it, or take it seconds.
MAX_TEXT_BYTES = {
    ConstraintKind.JSON_OBJECT: 0,
    ConstraintKind.JSON_SCHEMA: 128 * 1024,
    ConstraintKind.REGEX: 4 * 1024,
    ConstraintKind.CHOICE: 64 * 1024,
    ConstraintKind.GRAMMAR: 64 * 1024,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """kind: how to read `text`.

    text: nothing for `json_object`, a JSON Schema, a regex that the whole answer matches, a JSON array of strings of
    which the answer is one, or a grammar in the Lark dialect of llguidance.
    """

    kind: ConstraintKind
    text: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, ConstraintKind):
            kinds = ", ".join(ConstraintKind)
            raise InvalidRequest("constraint", f"a constraint's kind must be one of {kinds}, not {self.kind!r}")
        field = self.field
        if not isinstance(self.text, str):
            raise InvalidRequest(field, f"{field} must be a string")
        try:
            size = len(self.text.encode("utf-8"))
        except UnicodeEncodeError:
            raise InvalidRequest(field, f"{field} is not valid Unicode: it has an unpaired surrogate") from None
        limit = MAX_TEXT_BYTES[self.kind]
        if size > limit:
            raise InvalidRequest(field, f"{field} has {size} bytes, at most {limit} are allowed")
        if not size and limit:
            raise InvalidRequest(field, f"{field} is empty")
        if self.kind is ConstraintKind.JSON_SCHEMA and not isinstance(_parse(field, self.text), dict):
            raise InvalidRequest(field, f"{field} must be a JSON object")
        if self.kind is ConstraintKind.CHOICE:
            _check_choices(_parse(field, self.text))

    @classmethod
    def json_object(cls) -> Constraint:
        return cls(kind=ConstraintKind.JSON_OBJECT)

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | str) -> Constraint:
        """schema: parsed or not."""
        return cls(kind=ConstraintKind.JSON_SCHEMA, text=schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        return cls(kind=ConstraintKind.REGEX, text=pattern)

    @classmethod
    def choice(cls, strings: Sequence[str]) -> Constraint:
        _check_choices(strings)
        return cls(kind=ConstraintKind.CHOICE, text=json.dumps(list(strings), ensure_ascii=False))

    @classmethod
    def grammar(cls, lark: str) -> Constraint:
        return cls(kind=ConstraintKind.GRAMMAR, text=lark)

    @property
    def field(self) -> str:
        """The name under which errors speak of this constraint."""
        return str(self.kind)

    def to_wire(self) -> list[str]:
        return [str(self.kind), self.text]

    @classmethod
    def from_wire(cls, wire: Sequence[str]) -> Constraint:
        kind, text = wire
        return cls(kind=ConstraintKind(kind), text=text)


def _parse(field: str, text: str) -> object:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest(field, f"{field} is not valid JSON: {error.msg} at {where}") from None
    except ValueError as error:  # NaN and Infinity, or an integer of thousands of digits
        raise InvalidRequest(field, f"{field} is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest(field, f"{field} is nested too deeply") from None


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON value")


def _check_choices(strings: object) -> None:
    if isinstance(strings, str) or not isinstance(strings, Sequence) or not strings:
        raise InvalidRequest("choice", "choice must be a list of at least one string")
    if len(strings) > MAX_CHOICE_STRINGS:
        message = f"choice has {len(strings)} strings, at most {MAX_CHOICE_STRINGS} are allowed"
        raise InvalidRequest("choice", message)
    if not all(isinstance(text, str) and text for text in strings):
        raise InvalidRequest("choice", "each choice must be a string that is not empty")
