"""What the OpenAI endpoints accept: JSON bodies to calls.

Owns: the body models, the endpoints' defaults, the list of OpenAI fields that are refused, and turning every
schema error into `InvalidRequest` with the field's path.
Does not: check sampling ranges (SamplingParams) or token ids against a vocabulary (the service).
Invariants: JSON types are strict ("5" is no number); a field that would change the answer and is not supported is
refused by name, while unknown and harmless fields are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.core.errors import InvalidRequest
from router.generation import GenerationCall

COMPLETION_MAX_TOKENS = 16

# Field -> the values that ask for nothing we lack. Absent and null are always fine.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "add_special_tokens": (True,),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}

_ROLES = ("system", "user", "assistant")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class _Body(BaseModel):
    """Fields that both endpoints have."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    cache_salt: str | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Refuse what the schema alone cannot."""
        for name, harmless in _UNSUPPORTED.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and not any(_same(value, other) for other in harmless):
                raise InvalidRequest(name, f"{name} is not supported{_or_only(harmless)}")
        if self.stream_options is not None and not self.streams:
            raise InvalidRequest("stream_options", "stream_options needs stream: true")

    def _call(self, max_tokens: int | None, **prompt: Any) -> GenerationCall:
        names = ("temperature", "top_p", "top_k", "seed", "ignore_eos", "n", "length_penalty", "early_stopping")
        sampling = {name: value for name in names if (value := getattr(self, name)) is not None}
        if max_tokens is not None:
            sampling["max_tokens"] = max_tokens
        sampling |= self._rows()
        if self.stop is not None:
            sampling["stop"] = _stop(self.stop)
        if self.stop_token_ids is not None:
            sampling["stop_token_ids"] = tuple(self.stop_token_ids)
        return GenerationCall(model=self.model or "", sampling=sampling, cache_salt=self.cache_salt or "", **prompt)

    def _rows(self) -> dict[str, int]:
        """best_of and beam_width. vLLM's `use_beam_search` searches with best_of, or n, beams."""
        if self.use_beam_search is False and self.beam_width:
            raise InvalidRequest("beam_width", "beam_width needs use_beam_search: true, or no use_beam_search at all")
        if self.use_beam_search and self.beam_width is None:
            field = "n" if self.best_of is None else "best_of"
            width = self.n if self.best_of is None else self.best_of
            width = 1 if width is None else width
            if width < max(self.n or 1, 1):
                raise InvalidRequest(field, f"{field} ({width}) must be at least n ({self.n or 1})")
            return {"beam_width": width}
        if self.use_beam_search and not self.beam_width:
            raise InvalidRequest("beam_width", "beam_width must be at least 1 with use_beam_search")
        rows = {"best_of": self.best_of, "beam_width": self.beam_width}
        return {name: value for name, value in rows.items() if value is not None}


class CompletionBody(_Body):
    """POST /v1/completions."""

    prompt: Any = None

    def call(self) -> GenerationCall:
        max_tokens = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self._call(max_tokens, **_prompt(self.prompt))


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Any = None
    name: str | None = None


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None

    def call(self) -> GenerationCall:
        if not self.messages:
            raise InvalidRequest("messages", "messages is empty")
        messages = [_message(f"messages[{index}]", message) for index, message in enumerate(self.messages)]
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._call(max_tokens, messages=messages, prompt_field="messages")


BodyT = TypeVar("BodyT", bound=_Body)


def parse(kind: type[BodyT], data: bytes) -> BodyT:
    """A request body; every mistake is `InvalidRequest`."""
    try:
        body = kind.model_validate_json(data.decode())
    except UnicodeDecodeError as error:
        raise InvalidRequest("body", f"the body is not valid UTF-8: byte {error.start}") from None
    except ValidationError as error:
        raise _translated(error) from None
    body.check()
    return body


def _translated(error: ValidationError) -> InvalidRequest:
    """Pydantic's first complaint. Its input value stays out: it may be prompt text."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    path = _path(first["loc"])
    if first["type"] == "json_invalid":
        return InvalidRequest("body", f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if not path:
        return InvalidRequest("body", "the body must be a JSON object")
    if first["type"] == "missing":
        return InvalidRequest(path, f"{path} is missing")
    return InvalidRequest(path, f"{path}: {first['msg'][:1].lower()}{first['msg'][1:]}")


def _path(location: Iterable[int | str]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _same(value: Any, other: Any) -> bool:
    # Python's True == 1, but JSON's true is no number.
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _or_only(harmless: tuple[Any, ...]) -> str:
    return "" if not harmless else f"; only {harmless[0]!r} is"


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        raise InvalidRequest("stop", "stop must be a string or a list of strings")
    return tuple(stops)


def _prompt(value: Any) -> dict[Literal["text", "token_ids"], Any]:
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


def _message(path: str, message: ChatMessage) -> dict[str, Any]:
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
