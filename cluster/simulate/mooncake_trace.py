"""mooncake_trace: requests of a trace file in the Mooncake format, one JSON object a line.

    {"timestamp": 3000, "input_length": 1100, "output_length": 50, "hash_ids": [0, 7, 8]}

A hash id names a block of 512 tokens *and all before it*; the last one may stand for fewer. Timestamps are in
milliseconds, rounded down to 3 s, so each is smeared over the 3 s behind it, with a seed: otherwise requests would
come in bursts that never were.

Owns: reading, checking, and the order of arrival.
Does not: know tokens (prompt_tokens) or change traces (trace_variants).
Invariants: the same file and seed give the same requests; arrivals are sorted and begin at 0 or later; every problem
is a ConfigError that names the line.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from cluster.core.errors import ConfigError

TRACE_BLOCK = 512
SMEAR_S = 3.0
_FIELDS = ("timestamp", "input_length", "output_length")


class TraceRequest(NamedTuple):
    """number: its line, from 0.  segment_tokens: what one hash id stands for; the last may be cut by prompt_tokens."""

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    segment_tokens: int = TRACE_BLOCK

    @property
    def request_id(self) -> str:
        return f"r{self.number}"


def read_trace(path: Path, *, seed: int = 0, limit: int | None = None) -> list[TraceRequest]:
    """`limit`: only the first requests of the file."""
    rng = random.Random(seed)
    requests: list[TraceRequest] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if limit is not None and number >= limit:
                    break
                try:
                    requests.append(_request(number, line, rng))
                except (ValueError, RecursionError) as error:
                    raise ConfigError(f"{path.name}, line {number + 1}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name}: cannot be read: {error}") from None
    if not requests:
        raise ConfigError(f"{path.name}: the trace has no requests")
    return sorted(requests, key=lambda request: request.arrival_s)


def _request(number: int, line: str, rng: random.Random) -> TraceRequest:
    """ValueError says what is wrong."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    timestamp, prompt, output = (_whole_number(fields, name) for name in _FIELDS)
    hash_ids = fields.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(type(one) is int and one >= 0 for one in hash_ids):
        raise ValueError("hash_ids must be a list of whole numbers, 0 or more")
    if prompt < 1 or output < 1:
        raise ValueError("input_length and output_length must be at least 1")
    if len(hash_ids) != -(-prompt // TRACE_BLOCK):
        wanted = -(-prompt // TRACE_BLOCK)
        raise ValueError(f"{len(hash_ids)} hash_ids, but input_length {prompt} makes {wanted} blocks of {TRACE_BLOCK}")
    arrival = timestamp / 1000 + rng.random() * SMEAR_S
    return TraceRequest(number, arrival, prompt, output, tuple(hash_ids))


def _whole_number(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError(f"{name} must be a whole number, 0 or more")
    return value
