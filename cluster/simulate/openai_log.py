"""openai_log: requests of a log of OpenAI request bodies, hashed here; nothing of their text is kept.

One JSON object a line, in one of three forms:

    {"timestamp": 1764525600.25, "body": {"model": "m", "messages": [...]}, "usage": {"completion_tokens": 57}}
    {"timestamp": "2026-11-30T18:00:00.250Z", "model": "m", "prompt": "...", "max_tokens": 100}
    {"custom_id": "a-1", "method": "POST", "url": "/v1/chat/completions", "body": {...}, "response": {"body": {...}}}

`timestamp` is seconds (above 1e11: milliseconds) or ISO 8601, else the answer's `created`. A log without any is spread
by chance (`LogRequests.timed`). The answer's length is `usage.completion_tokens`, of the line or of its `response`,
else max_completion_tokens or max_tokens, which is at most, else a default.

Owns: these forms, the prompt that a body means, and its hashes by model and salt.
Does not: render templates or tokenise (cluster.tokenizer), or run anything.
Invariants: text lives for one line only; errors name the line and say nothing of what stands in it; requests are sorted
by arrival, the first at 0.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from cluster.core.errors import ConfigError
from cluster.core.hashing import ChunkHash, RouteScheme, hash_prompt, root_hash
from cluster.simulate.mooncake_trace import TraceRequest
from cluster.simulate.openai_prompt import BadLine, chat_messages, folded, text_prompt
from cluster.simulate.recorded_trace import Arrival, HashNumbers, in_order

_MILLISECONDS_FROM = 1e11
_MAX_TOKENS = 1 << 30


class PromptTokenizer(Protocol):
    """What this needs of cluster.tokenizer.Tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRequests:
    """lengths: of how many requests the answer's length comes from `usage`, from `max_tokens`, from the `default`.

    timed: the log says when requests came; else they come by chance, one a second on average.
    left_out: parts of messages that are not text.
    """

    requests: list[TraceRequest]
    lengths: Counter[str]
    timed: bool
    left_out: int


def read_log(
    path: Path,
    tokenizer: PromptTokenizer,
    *,
    block_tokens: int,
    default_output: int,
    seed: int = 0,
    limit: int | None = None,
) -> LogRequests:
    """`limit`: only the first requests of the file. ConfigError names the line."""
    reader = _Reader(tokenizer, block_tokens, default_output)
    arrivals: list[Arrival] = []
    times: list[float | None] = []
    for number, line in _lines(path):
        if limit is not None and len(arrivals) >= limit:
            break
        try:
            arrival, time_s = reader.request(line)
            if times and (time_s is None) != (times[0] is None):
                raise BadLine("some lines have a timestamp and some have none")
        except BadLine as error:
            raise ConfigError(f"{path.name}, line {number}: {error}") from None
        arrivals.append(arrival)
        times.append(time_s)
    known = [time_s for time_s in times if time_s is not None]
    at = _since_first(known, seed) if known else _by_chance(len(arrivals), seed)
    timed = [arrival._replace(arrival_s=time_s) for arrival, time_s in zip(arrivals, at, strict=True)]
    return LogRequests(
        requests=in_order(timed, block_tokens, path.name),
        lengths=reader.lengths,
        timed=bool(known),
        left_out=reader.left_out,
    )


class _Reader:
    def __init__(self, tokenizer: PromptTokenizer, block_tokens: int, default_output: int) -> None:
        self._tokenizer = tokenizer
        self._block_tokens = block_tokens
        self._default_output = default_output
        self._roots: dict[tuple[str, str], ChunkHash] = {}
        self._numbers = HashNumbers()
        self.lengths: Counter[str] = Counter()
        self.left_out = 0

    def request(self, line: str) -> tuple[Arrival, float | None]:
        """Its time, too; None where the line has none."""
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            raise BadLine("not valid JSON") from None
        if not isinstance(fields, dict):
            raise BadLine("not a JSON object")
        body = fields.get("body", fields)
        if not isinstance(body, dict):
            raise BadLine("body must be a JSON object")
        tokens = self._tokens(body)
        hashes = hash_prompt(self._root(body), tokens, self._block_tokens)
        output = self._output_tokens(fields, body)
        return Arrival(0.0, len(tokens), output, self._numbers.of(hashes)), _time(fields)

    def _tokens(self, body: Mapping[str, Any]) -> Sequence[int]:
        if body.get("messages") is not None:
            messages, left_out = chat_messages(body)
            self.left_out += left_out
            tokens: Sequence[int] = self._templated(messages)
        else:
            prompt = text_prompt(body, self._tokenizer.vocab_size)
            tokens = self._encoded(prompt) if isinstance(prompt, str) else prompt
        if not tokens:
            raise BadLine("the prompt is empty")
        return tokens

    def _templated(self, messages: list[dict[str, str]]) -> list[int]:
        for form in (messages, folded(messages)):
            try:
                return self._tokenizer.apply_chat_template(form)
            except Exception:  # whatever a template or the library says may hold text
                continue
        raise BadLine("the chat template refuses these messages")

    def _encoded(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text)
        except Exception:  # as above
            raise BadLine("the prompt cannot be tokenised") from None

    def _root(self, body: Mapping[str, Any]) -> ChunkHash:
        """Models and salts share nothing."""
        model, salt = (str(body.get(name) or "") for name in ("model", "cache_salt"))
        if (model, salt) not in self._roots:
            self._roots[model, salt] = root_hash(
                RouteScheme(
                    tokenizer_revision="log",
                    model_revision="log",
                    chunk_tokens=self._block_tokens,
                    adapter=model.encode("utf-8", "backslashreplace").decode(),
                    salt=salt.encode("utf-8", "backslashreplace").decode(),
                )
            )
        return self._roots[model, salt]

    def _output_tokens(self, fields: Mapping[str, Any], body: Mapping[str, Any]) -> int:
        for answer in _answers(fields):
            usage = answer.get("usage")
            if isinstance(usage, dict) and usage.get("completion_tokens") is not None:
                return self._length("usage", usage["completion_tokens"])
        for name in ("max_completion_tokens", "max_tokens"):
            if body.get(name) is not None:
                return self._length("max_tokens", body[name])
        return self._length("default", self._default_output)

    def _length(self, source: str, tokens: Any) -> int:
        if type(tokens) is not int or not 0 <= tokens < _MAX_TOKENS:
            raise BadLine("the answer's length must be a whole number of tokens, 0 or more")
        self.lengths[source] += 1
        return max(tokens, 1)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with path.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if raw.strip():
                    yield number, raw.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path.name}, line {number}: not valid UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path.name}: cannot be read: {error.strerror or 'unknown error'}") from None


def _answers(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Where a line may keep what the server answered."""
    yield fields
    response = fields.get("response")
    if isinstance(response, dict):
        yield response
        if isinstance(response.get("body"), dict):
            yield response["body"]


def _time(fields: Mapping[str, Any]) -> float | None:
    value = fields.get("timestamp")
    if value is None:
        value = next((answer["created"] for answer in _answers(fields) if answer.get("created") is not None), None)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            raise BadLine("timestamp is neither a number nor ISO 8601") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise BadLine("timestamp must be seconds, 0 or more, or ISO 8601")
    return value / 1000 if value > _MILLISECONDS_FROM else float(value)


def _since_first(times: Sequence[float], seed: int) -> list[float]:
    """Times in whole seconds are smeared over the second, or requests would come in bursts that never were."""
    rng = random.Random(seed)
    if all(time_s == int(time_s) for time_s in times):
        times = [time_s + rng.random() for time_s in times]
    first = min(times)
    return [time_s - first for time_s in times]


def _by_chance(count: int, seed: int) -> list[float]:
    rng, at, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(at)
        at += rng.expovariate(1.0)
    return times
