"""What the OpenAI endpoints accept: JSON bodies to calls.

Owns: the body models, the endpoints' defaults, and turning every schema error into `InvalidRequest` with the field's
path.
Does not: read fields of several forms (http_fields, http_constraint), know the fields that are refused
(http_unsupported), check ranges (SamplingParams, GenerationRequest, Deadline) or token ids against a vocabulary (the
service).
Invariants: JSON types are strict ("5" is no number); a field that would change the answer and is not supported is
refused by name, while unknown and harmless fields are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.core.errors import InvalidRequest
from cluster.core.sampling import MAX_LOGPROBS
from router.generation import GenerationCall
from router.http_constraint import constraint_of
from router.http_fields import ChatMessage, logit_bias_of, message_of, prompt_of, stop_of
from router.http_unsupported import refuse_unsupported

COMPLETION_MAX_TOKENS = 16

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")

# Fields that are sampling parameters as they are.
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "min_tokens", "include_stop_str_in_output"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "prompt_logprobs"),
    *("n", "length_penalty", "early_stopping"),
)


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
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Any = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
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
    priority: int | None = None
    timeout_s: float | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Refuse what the schema alone cannot."""
        refuse_unsupported(self.model_extra or {})
        if self.stream_options is not None and not self.streams:
            raise InvalidRequest("stream_options", "stream_options needs stream: true")

    def _call(
        self, max_tokens: int | None, logprobs: int | None, *, echo: bool = False, **prompt: Any
    ) -> GenerationCall:
        sampling = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if max_tokens is not None:
            sampling["max_tokens"] = max_tokens
        if logprobs is not None:
            sampling["logprobs"] = logprobs
            if echo:
                sampling["prompt_logprobs"] = logprobs
        if self.logit_bias is not None:
            sampling["logit_bias"] = logit_bias_of(self.logit_bias)
        sampling |= self._rows()
        if self.stop is not None:
            sampling["stop"] = stop_of(self.stop)
        if self.stop_token_ids is not None:
            sampling["stop_token_ids"] = tuple(self.stop_token_ids)
        guided = {name: getattr(self, name) for name in _GUIDED}
        return GenerationCall(
            model=self.model or "",
            sampling=sampling,
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
            timeout_s=self.timeout_s,
            echo=echo,
            constraint=constraint_of(self.response_format, self.structured_outputs, guided),
            **prompt,
        )

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
    logprobs: int | None = None
    echo: bool | None = None

    def call(self) -> GenerationCall:
        max_tokens = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        echo = bool(self.echo)
        if echo and self.logprobs is not None and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs", "prompt_logprobs: with echo, logprobs are the prompt's, too")
        return self._call(max_tokens, self.logprobs, echo=echo, **prompt_of(self.prompt))


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def call(self) -> GenerationCall:
        if not self.messages:
            raise InvalidRequest("messages", "messages is empty")
        messages = [message_of(f"messages[{index}]", message) for index, message in enumerate(self.messages)]
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._call(max_tokens, self._logprobs(), messages=messages, prompt_field="messages")

    def _logprobs(self) -> int | None:
        """How many alternatives; None for no log probabilities at all."""
        count = self.top_logprobs or 0
        if not 0 <= count <= MAX_LOGPROBS:
            raise InvalidRequest("top_logprobs", f"top_logprobs must be between 0 and {MAX_LOGPROBS}, not {count}")
        if count and not self.logprobs:
            raise InvalidRequest("top_logprobs", "top_logprobs needs logprobs: true")
        return count if self.logprobs else None


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
