"""recorded_trace: kvray's own trace of requests: a line that says what it is, then one JSON object a line.

    {"format": "kvray-trace", "version": 1, "block_tokens": 64}
    {"timestamp": 3127, "input_length": 300, "output_length": 50, "hash_ids": [0, 1, 2, 3]}
    {"timestamp": 2950, "input_length": 200, "output_length": 12, "hash_ids": [0, 1, 4]}

A hash id names a whole block *and all before it*, as in the Mooncake format, numbered as they come. What has no id (the
rest of a prompt behind its whole blocks, or more where a prompt must not be found in a cache) is in no other request.
Timestamps are milliseconds since the recording began; lines come in the order in which requests ended.

Owns: writing and reading this format, and telling it from Mooncake's.
Does not: hash (cluster.core.hashing) or record (router.traffic_recorder).
Invariants: an id says that two blocks are equal and nothing else; requests are sorted by arrival; every problem is a
ConfigError that names the line.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from cluster.core.errors import ConfigError
from cluster.simulate.mooncake_trace import TraceRequest, read_trace

FORMAT, VERSION = "kvray-trace", 1
_MAX_ID = 1 << 30
_MAX_NUMBER = 1 << 53


class Arrival(NamedTuple):
    """A request before its order among all others is known. ids: of its first whole blocks."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    ids: tuple[int, ...]


class HashNumbers:
    """Numbers hashes as they come, so that nothing of them is left but which are equal."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def of(self, hashes: Iterable[Hashable]) -> tuple[int, ...]:
        numbers = self._numbers
        return tuple(numbers.setdefault(one, len(numbers)) for one in hashes)


class TraceWriter:
    def __init__(self, file: TextIO, block_tokens: int) -> None:
        self._file = file
        self._numbers = HashNumbers()
        self.count = 0
        self._line({"format": FORMAT, "version": VERSION, "block_tokens": block_tokens})

    def write(self, arrival_s: float, prompt_tokens: int, output_tokens: int, hashes: Sequence[Hashable]) -> None:
        self.count += 1
        self._line(
            {
                "timestamp": round(1000 * arrival_s),
                "input_length": prompt_tokens,
                "output_length": output_tokens,
                "hash_ids": self._numbers.of(hashes),
            }
        )

    def _line(self, fields: dict[str, Any]) -> None:
        self._file.write(json.dumps(fields) + "\n")


def read_requests(path: Path, *, seed: int = 0, limit: int | None = None) -> list[TraceRequest]:
    """A trace in either format. `limit`: only the first requests of the file."""
    try:
        with path.open(encoding="utf-8") as lines:
            block = _block_tokens(next(lines, ""))
            if block is None:
                return read_trace(path, seed=seed, limit=limit)
            return in_order(_arrivals(path.name, lines, block, limit), block, path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name}: cannot be read: {error}") from None


def in_order(arrivals: Iterable[Arrival], block_tokens: int, name: str) -> list[TraceRequest]:
    """As requests of a simulation, with an id of their own for every block that has none."""
    found = list(arrivals)
    if not found:
        raise ConfigError(f"{name}: the trace has no requests")
    fresh = count(1 + max((one for arrival in found for one in arrival.ids), default=0))
    requests = [
        TraceRequest(
            number,
            one.arrival_s,
            one.prompt_tokens,
            one.output_tokens,
            (*one.ids, *(next(fresh) for _ in range(-(-one.prompt_tokens // block_tokens) - len(one.ids)))),
            block_tokens,
        )
        for number, one in enumerate(found)
    ]
    if next(fresh) >= 2 * _MAX_ID:
        raise ConfigError(f"{name}: the trace has too many different blocks")
    return sorted(requests, key=lambda request: request.arrival_s)


def _block_tokens(line: str) -> int | None:
    """None when this is not the first line of our own format."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        return None
    if fields.get("version") != VERSION:
        raise ConfigError(f"this trace is of version {fields.get('version')!r}; this kvray reads version {VERSION}")
    block = fields.get("block_tokens")
    if type(block) is not int or not 1 <= block <= 65536:
        raise ConfigError("the trace's block_tokens must be a whole number from 1 to 65536")
    return block


def _arrivals(name: str, lines: Iterable[str], block: int, limit: int | None) -> Iterator[Arrival]:
    for number, line in enumerate(lines):
        if limit is not None and number >= limit:
            return
        try:
            yield _arrival(json.loads(line), block)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}, line {number + 2}: {error}") from None


def _arrival(fields: Any, block: int) -> Arrival:
    """ValueError says what is wrong."""
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    timestamp, prompt, output = (fields.get(name) for name in ("timestamp", "input_length", "output_length"))
    if type(timestamp) is not int or not 0 <= timestamp < _MAX_NUMBER:
        raise ValueError("timestamp must be a whole number of milliseconds, 0 or more")
    for name, value in (("input_length", prompt), ("output_length", output)):
        if type(value) is not int or not 1 <= value < _MAX_ID:
            raise ValueError(f"{name} must be a whole number, 1 or more")
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < _MAX_ID for one in ids):
        raise ValueError(f"hash_ids must be a list of whole numbers from 0 to {_MAX_ID - 1}")
    assert isinstance(prompt, int) and isinstance(output, int)
    if len(ids) > prompt // block:
        raise ValueError(
            f"{len(ids)} hash_ids, but input_length {prompt} has {prompt // block} whole blocks of {block}"
        )
    return Arrival(timestamp / 1000, prompt, output, tuple(ids))
