"""The payloads in Redis: msgpack, bounded, parsed strictly; an entry has a checksum before it.

Owns: the byte form of an IndexEntry, a ReplicaInfo and a heartbeat, and every check on the way back.
Does not: know keys, or decide what happens to a bad payload: it raises `BadPayload`, the reader counts and skips.
Invariants: decode(encode(x)) == x; no bytes whatever make a decoder raise anything but `BadPayload`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any
from zlib import crc32

import msgpack

from cluster.core.errors import KvrayError
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import HASH_BYTES
from cluster.core.replica import Epoch, ReplicaInfo, ReplicaLoad, WorkerId
from cluster.index.base import MAX_CHUNKS_PER_ENTRY, Heartbeat, IndexEntry, unpack_hashes

MAX_PAYLOAD_BYTES = 256 * 1024
MAX_EVENTS_PER_ENTRY = 4096
MAX_TEXT = 1024
MAX_ROUTERS = 4096
_MAX_INT = 2**63 - 1
_CHECKSUM = struct.Struct("<I")


class BadPayload(KvrayError):
    """Bytes that are not what their key says."""

    code = "bad_payload"


def encode_entry(worker_id: WorkerId, epoch: Epoch, seq: int, events: Sequence[CacheEvent]) -> bytes:
    """CRC-32 and [worker, epoch, seq, [[kind, hashes end to end], ...]]. ValueError when it would be over the bounds.

    The checksum, because a hash with a wrong bit is a hash: applied, it would credit a worker with what nobody asks
    for and never be removed.
    """
    chunks = sum(len(event.chunk_hashes) for event in events)
    if chunks > MAX_CHUNKS_PER_ENTRY or len(events) > MAX_EVENTS_PER_ENTRY:
        raise ValueError(f"{len(events)} events with {chunks} chunks are too much for one entry")
    packed = [[str(event.kind), b"".join(event.chunk_hashes)] for event in events]
    body = _pack([worker_id, epoch, seq, packed])
    return _CHECKSUM.pack(crc32(body)) + body


def decode_entry(payload: bytes) -> IndexEntry:
    _check_size(payload)
    body = payload[_CHECKSUM.size :]
    if len(payload) < _CHECKSUM.size or _CHECKSUM.unpack_from(payload)[0] != crc32(body):
        raise BadPayload("wrong checksum")
    worker_id, epoch, seq, packed = _list(_unpack(body), 4)
    if not isinstance(packed, list) or len(packed) > MAX_EVENTS_PER_ENTRY:
        raise BadPayload("events are not a list of bounded length")
    events = tuple(_event(item) for item in packed)
    if sum(len(event.chunk_hashes) for event in events) > MAX_CHUNKS_PER_ENTRY:
        raise BadPayload("too many chunks in one entry")
    return IndexEntry(WorkerId(_text(worker_id)), Epoch(_count(epoch)), _count(seq), events)


def encode_info(info: ReplicaInfo) -> bytes:
    return _pack(info.to_wire())


def decode_info(payload: bytes) -> ReplicaInfo:
    wire = {"incarnation": "", **_dict(_unpack(payload))}  # workers of an earlier version have none
    return ReplicaInfo.from_wire(
        {f.name: (_count if f.type == "int" else _text)(wire.get(f.name)) for f in fields(ReplicaInfo)}
    )


def encode_heartbeat(epoch: Epoch, load: ReplicaLoad) -> bytes:
    return _pack([epoch, load.to_wire()])


def decode_heartbeat(payload: bytes) -> Heartbeat:
    epoch, wire = _list(_unpack(payload), 2)
    wire = _dict(wire)
    defaults = ReplicaLoad()
    values: dict[str, Any] = {}
    for f in fields(ReplicaLoad):
        default = getattr(defaults, f.name)
        value = wire.get(f.name, default)
        if isinstance(default, dict):
            values[f.name] = _tokens_by_router(value)
        elif isinstance(default, bool):
            values[f.name] = _flag(value)
        elif isinstance(default, tuple):
            values[f.name] = _coefficients(value)
        else:
            values[f.name] = _rate(value) if isinstance(default, float) else _count(value)
    return Heartbeat(epoch=Epoch(_count(epoch)), load=ReplicaLoad(**values))


def _pack(value: object) -> bytes:
    payload: bytes = msgpack.packb(value, use_bin_type=True)
    if len(payload) > MAX_PAYLOAD_BYTES - _CHECKSUM.size:
        raise ValueError(f"a payload of {len(payload)} bytes is over the limit of {MAX_PAYLOAD_BYTES}")
    return payload


def _check_size(payload: bytes) -> None:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise BadPayload(f"{len(payload)} bytes are over the limit of {MAX_PAYLOAD_BYTES}")


def _unpack(payload: bytes) -> object:
    _check_size(payload)
    try:
        return msgpack.unpackb(payload, raw=False, strict_map_key=True)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise BadPayload(f"not msgpack: {error}") from error


def _event(item: object) -> CacheEvent:
    kind, packed = _list(item, 2)
    if not isinstance(packed, bytes) or len(packed) % HASH_BYTES:
        raise BadPayload("chunk hashes are not whole")
    try:
        return CacheEvent(CacheEventKind(kind), unpack_hashes(packed))
    except ValueError as error:
        raise BadPayload(f"unknown kind of event: {error}") from error


def _list(value: object, length: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise BadPayload(f"expected a list of {length}")
    return value


def _dict(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise BadPayload("expected a map with text keys")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise BadPayload(f"expected text of at most {MAX_TEXT} characters")
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_INT:
        raise BadPayload("expected a count")
    return value


def _rate(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise BadPayload("expected a finite number, not negative")
    return float(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise BadPayload("expected true or false")
    return value


def _coefficients(value: object) -> tuple[float, ...]:
    """Of a step-time model: none, or all of them."""
    if not isinstance(value, list | tuple) or len(value) not in (0, 5):
        raise BadPayload("expected five coefficients, or none")
    return tuple(_rate(one) for one in value)


def _tokens_by_router(value: object) -> dict[str, int]:
    wire = _dict(value)
    if len(wire) > MAX_ROUTERS:
        raise BadPayload(f"more than {MAX_ROUTERS} routers")
    return {_text(router): _count(tokens) for router, tokens in wire.items()}
