"""Grammar source: a constraint in the grammar library's own language, and the library's complaints in ours.

Owns: the translation of every kind of constraint, the options of JSON output, what is refused beyond the library's own
checks, and the place in the constraint that an error message names.
Does not: build matchers (worker.grammar.compiled_grammar).
Invariants: a keyword of JSON Schema that changes what is valid is enforced or refused, never ignored; whitespace
between JSON tokens is bounded, so that a model cannot go on with blanks for ever.
"""

from __future__ import annotations

import json
import re

import llguidance

from cluster.core.constraint import Constraint, ConstraintKind
from cluster.core.errors import InvalidRequest
from worker.grammar.schema_walk import Schema, locate, walk

LIMITS = llguidance.LLParserLimits(verbose_errors=False)
# A blank, or a new line with its indentation.
_WHITESPACE = r"[ ]|\n(?:[ ]{0,32}|\t{0,8})"
_OPTIONS_KEY = "x-guidance"  # the library's options inside a schema
_MAX_MESSAGE = 400
_LARK_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_REGEX_POSITION = re.compile(r"regex parse error:\n {4}[^\n]*\n {4}( *)\^+[^\n]*\nerror: ([^\n]*)")


def source_of(constraint: Constraint) -> str:
    """The library's grammar for `constraint`; InvalidRequest when kvray refuses it before the library sees it."""
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return _json_source({"type": "object"})
        case ConstraintKind.JSON_SCHEMA:
            schema = json.loads(constraint.text)
            _check_schema(constraint.field, schema)
            try:
                return _json_source(schema)
            except ValueError as error:
                raise _refused(constraint.field, "", str(error)) from None
        case ConstraintKind.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.CHOICE:
            return llguidance.LLMatcher.grammar_from_regex("|".join(map(_literal, json.loads(constraint.text))))
        case ConstraintKind.GRAMMAR:
            return llguidance.LLMatcher.grammar_from_lark(constraint.text)


def refusal(constraint: Constraint, message: str) -> InvalidRequest:
    """The library's `message` about `constraint`, with the place in the client's text."""
    message = message.replace("<non-verbose/>", "").strip()
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            pointer = locate(json.loads(constraint.text), _schema_fault)
            character, text = _regex_place(message)
            at = f"#{pointer}, {character} of its pattern" if character else f"#{pointer}"
        case ConstraintKind.GRAMMAR:
            at, text = _lark_place(message)
        case _:
            at, text = _regex_place(message)
    return _refused(constraint.field, at, text)


def _refused(field: str, at: str, text: str) -> InvalidRequest:
    """`details["at"]` is the place, "" where it is not known."""
    text = text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."
    return InvalidRequest(field, f"{field} is refused{' at ' if at else ''}{at}: {text}", at=at)


def _json_source(schema: Schema) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"lenient": False, "coerce_one_of": False, "whitespace_pattern": _WHITESPACE}
    )


def _schema_fault(schema: Schema) -> str:
    try:
        return llguidance.LLMatcher.validate_grammar(_json_source(schema), limits=LIMITS)
    except ValueError as error:
        return str(error)


def _check_schema(field: str, schema: Schema) -> None:
    if _OPTIONS_KEY in schema:
        raise _refused(field, f"#/{_OPTIONS_KEY}", "the grammar library's options are fixed")
    for pointer, inner in walk(schema):
        least, required = inner.get("minProperties"), inner.get("required")
        named = len(required) if isinstance(required, list) else 0
        if isinstance(least, int) and least > named + 1:
            reason = f"minProperties {least} with {named} required names: other names may repeat, so it cannot hold"
            raise _refused(field, f"#{pointer}", reason)


def _literal(text: str) -> str:
    """A regex that matches exactly `text`."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _lark_place(message: str) -> tuple[str, str]:
    found = _LARK_POSITION.match(message)
    if found is None:
        return "", message
    line, column, text = found.groups()
    return f"line {line}, column {column}", _first_line(text)


def _regex_place(message: str) -> tuple[str, str]:
    found = _REGEX_POSITION.search(message)
    if found is not None:
        return f"character {len(found[1]) + 1}", found[2]
    found = _LARK_POSITION.match(message)
    return "", _first_line(message if found is None else found[3])


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]
