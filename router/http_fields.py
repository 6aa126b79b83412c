"""Fields of OpenAI bodies that have several forms: prompt, messages, stop, logit_bias.

Owns: reading each form, and refusing all others by the field's path.
Does not: know whole bodies (http_schema), sampling ranges (SamplingParams) or a vocabulary (the service).
Invariants: JSON types are strict; an error never repeats a prompt's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from cluster.core.errors import InvalidRequest

_ROLES = ("system", "user", "assistant")


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Any = None
    name: str | None = None


def stop_of(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        raise InvalidRequest("stop", "stop must be a string or a list of strings")
    return tuple(stops)


def logit_bias_of(value: Any) -> tuple[tuple[int, Any], ...]:
    """JSON's keys are strings; the numbers are checked by the service."""
    if not isinstance(value, dict):
        raise InvalidRequest("logit_bias", "logit_bias must be an object of token ids and numbers")
    if not all(key.isascii() and key.isdigit() and len(key) <= 10 for key in value):
        raise InvalidRequest("logit_bias", "logit_bias: every key must be a token id")
    return tuple((int(key), bias) for key, bias in value.items())


def prompt_of(value: Any) -> dict[Literal["text", "token_ids"], Any]:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise InvalidRequest("prompt", f"prompt holds {len(value)} prompts; send one request for each")
        value = value[0]
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise InvalidRequest("prompt", "prompt must be a string or a list of token ids")
    if not value:
        raise InvalidRequest("prompt", "prompt is empty")
    if min(value) < 0:
        raise InvalidRequest("prompt", f"prompt: token ids must be >= 0, not {min(value)}")
    return {"token_ids": tuple(value)}


def message_of(path: str, message: ChatMessage) -> dict[str, Any]:
    # OpenAI's newer name for the system role; models' own templates do not know it.
    role = "system" if message.role == "developer" else message.role
    if role not in _ROLES:
        raise InvalidRequest(f"{path}.role", f"{path}.role must be one of {', '.join(_ROLES)}; tools are not supported")
    for name in ("tool_calls", "function_call", "audio"):
        if (message.model_extra or {}).get(name):
            raise InvalidRequest(f"{path}.{name}", f"{path}.{name} is not supported")
    plain: dict[str, Any] = {"role": role, "content": _content(f"{path}.content", message.content)}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _content(path: str, content: Any) -> str:
    """Text parts are joined by newlines, as other servers do for templates that take strings."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(path, f"{path} must be a string or a list of text parts")
    return "\n".join(_part(f"{path}[{index}]", part) for index, part in enumerate(content))


def _part(path: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise InvalidRequest(path, f"{path} must be a part of type text; this server reads text only")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.text", f"{path}.text must be a string")
    return text
