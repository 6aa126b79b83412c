"""ChatTemplate: a model's Jinja chat template, rendered the way transformers renders it.

Owns: finding the template in a model directory, the sandboxed environment, the special tokens it may print, and where
in the text each message ended up.
Does not: tokenise (cluster.tokenizer).
Invariants: the template sees plain JSON values only and cannot change them; every failure while rendering, and a
missing template, is `InvalidRequest("messages", ...)`, because other messages (or a text prompt) would work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.core.errors import ConfigError, InvalidRequest

# The keys of tokenizer_config.json that templates know as variables.
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

_MARK = re.compile("\ue000([0-9]+)\ue001")
_MAX_FRAMES = 256


class ChatTemplate:
    """`source` is None for a base model without a template; rendering then explains that."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._frames: dict[tuple[str, ...], tuple[str, ...]] = {}  # by roles
        try:
            self._template = None if source is None else _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template is broken: {error}") from error

    @classmethod
    def from_dir(cls, path: Path) -> ChatTemplate:
        """From `chat_template.jinja`, else from `tokenizer_config.json`."""
        config = read_json(path / "tokenizer_config.json")
        template_file = path / "chat_template.jinja"
        if template_file.is_file():
            source: str | None = template_file.read_text(encoding="utf-8")
        else:
            source = _default_template(config.get("chat_template"))
        return cls(source, _special_tokens(config, read_json(path / "special_tokens_map.json")))

    def message_ends(self, messages: Sequence[Mapping[str, Any]], text: str) -> tuple[int, ...]:
        """Where in `text`, which `messages` were rendered to, each of them ends; () if that cannot be told.

        What stands before a message's content, such as its role, belongs to it. It can be told when the template puts
        every content, stripped or as it is, into a frame that depends on the roles alone.
        """
        contents = [message.get("content") for message in messages]
        if any(not isinstance(content, str) for content in contents) or any(len(m) > 2 for m in messages):
            return ()
        roles = tuple(str(message.get("role")) for message in messages)
        frame = self._frames.get(roles)
        for _ in range(2):
            if frame is None:
                frame = self._frame(roles)
            ends = assemble(frame, [str(content) for content in contents], text)
            if ends:
                if len(self._frames) >= _MAX_FRAMES:
                    self._frames.clear()
                self._frames[roles] = frame
                return ends
            frame = None  # a template may print the time
        return ()

    def _frame(self, roles: tuple[str, ...]) -> tuple[str, ...]:
        """What the template puts before, between and after the contents."""
        marked = [{"role": role, "content": f"\ue000{number}\ue001"} for number, role in enumerate(roles)]
        try:
            parts = _MARK.split(self.render(marked))
        except InvalidRequest:
            return ()
        in_order = parts[1::2] == [str(number) for number in range(len(roles))]
        return tuple(parts[::2]) if in_order else ()

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text that asks the model for the next assistant message."""
        if self._template is None:
            raise InvalidRequest("messages", "this model has no chat template: send a text prompt instead")
        if not messages:
            raise InvalidRequest("messages", "messages is empty")
        # A key without a value would print as "None" in many templates, while a missing key is handled.
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(messages=plain, add_generation_prompt=True, **self.special_tokens)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise InvalidRequest("messages", f"the model's chat template refuses these messages: {error}") from error


def assemble(frame: Sequence[str], contents: Sequence[str], text: str) -> tuple[int, ...]:
    """The end of each content in `text`, if that is the frame filled with them; else ()."""
    if len(frame) != len(contents) + 1:
        return ()
    for filling in (contents, [content.strip() for content in contents]):
        ends, at = [], 0
        for before, content in zip(frame, filling, strict=False):
            at += len(before) + len(content)
            ends.append(at)
        filled = "".join(part for pair in zip(frame, (*filling, ""), strict=True) for part in pair)
        if filled == text:
            return tuple(ends)
    return ()


class _GenerationBlocks(Extension):
    """`{% generation %}` marks assistant text for training; for serving it is just its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it like this)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks]
    )
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    environment.filters["tojson"] = _tojson
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which is wrong in a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _default_template(value: Any) -> str | None:
    """The configuration holds a template, or a list of named ones."""
    if isinstance(value, list):
        named = {str(entry["name"]): str(entry["template"]) for entry in value}
        return next(iter(named.values())) if len(named) == 1 else named.get("default")
    return None if value is None else str(value)


def _special_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """Earlier files win. A token is written as a string or as an object with its `content`."""
    tokens: dict[str, str] = {}
    for config in configs:
        for name in _SPECIAL_TOKENS:
            value = config.get(name)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str):
                tokens.setdefault(name, value)
    return tokens


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value
