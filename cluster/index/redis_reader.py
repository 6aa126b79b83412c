"""RedisReader: a router's side of the index in Redis.

Owns: reading registrations, heartbeats, snapshots and the stream, and counting what cannot be parsed.
Does not: keep state between calls, or decide what to do about gaps (cluster.index.follower).
Invariants: bad bytes in Redis never raise: they are counted and skipped; a snapshot is of one instant.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any

from redis.asyncio import Redis

from cluster.config import IndexConfig
from cluster.core.hashing import HASH_BYTES
from cluster.core.replica import Epoch, WorkerId
from cluster.index.base import (
    Heartbeat,
    IndexEntry,
    IndexUnavailable,
    Registration,
    Snapshot,
    StreamEntry,
    StreamPosition,
)
from cluster.index.keys import IndexKeys
from cluster.index.redis_client import connect, load_script, unavailable_on_error
from cluster.index.wire import BadPayload, decode_entry, decode_heartbeat, decode_info

logger = logging.getLogger(__name__)

ENTRIES_PER_READ = 128
_BYTES_PER_SLICE = 32 * 1024  # parsed between two turns of the event loop


class RedisReader:
    """The `IndexReader` over Redis; closes the client that it was given."""

    def __init__(self, client: Redis, keys: IndexKeys, timeout_s: float) -> None:
        self._client = client
        self._keys = keys
        self._longest_block_ms = max(1, int(timeout_s * 500))
        self._snapshot = load_script(client, "snapshot")
        self._bad_payloads = 0

    @classmethod
    def open(cls, config: IndexConfig, url: str, model: str) -> RedisReader:
        keys = IndexKeys(prefix=config.key_prefix, model=model)
        return cls(connect(url, config.timeout_s), keys, config.timeout_s)

    @property
    def bad_payloads(self) -> int:
        return self._bad_payloads

    async def workers(self) -> dict[WorkerId, Registration]:
        with unavailable_on_error("list workers"):
            members: Any = await self._client.smembers(self._keys.workers)
            worker_ids = [WorkerId(member.decode(errors="replace")) for member in sorted(members)]
            async with self._client.pipeline(transaction=False) as pipeline:
                for worker_id in worker_ids:
                    pipeline.hmget(self._keys.worker(worker_id), ["epoch", "seq", "info"])
                rows: list[list[bytes | None]] = await pipeline.execute()
        found: dict[WorkerId, Registration] = {}
        for worker_id, (epoch, seq, info) in zip(worker_ids, rows, strict=True):
            if epoch is None or seq is None or info is None:
                continue
            try:
                registration = Registration(epoch=Epoch(int(epoch)), seq=int(seq), info=decode_info(info))
            except (BadPayload, ValueError) as error:
                self._count_bad(f"registration of {worker_id}", error)
                continue
            if registration.info.worker_id == worker_id:
                found[worker_id] = registration
            else:
                self._count_bad(f"registration of {worker_id}", "it names another worker")
        return found

    async def heartbeats(self, worker_ids: Collection[WorkerId]) -> dict[WorkerId, Heartbeat]:
        if not worker_ids:
            return {}
        with unavailable_on_error("read heartbeats"):
            payloads: Any = await self._client.mget([self._keys.beat(worker_id) for worker_id in worker_ids])
        found: dict[WorkerId, Heartbeat] = {}
        for worker_id, payload in zip(worker_ids, payloads, strict=True):
            if payload is None:
                continue
            try:
                found[worker_id] = decode_heartbeat(payload)
            except BadPayload as error:
                self._count_bad(f"heartbeat of {worker_id}", error)
        return found

    async def snapshot(self, worker_id: WorkerId) -> Snapshot | None:
        with unavailable_on_error("read a snapshot"):
            answer = await self._snapshot(keys=[self._keys.worker(worker_id), self._keys.chunks(worker_id)])
        if answer is None:
            return None
        epoch, seq, packed = answer
        try:
            if len(packed) % HASH_BYTES:
                raise ValueError("chunk hashes are not whole")
            return Snapshot(epoch=Epoch(int(epoch)), seq=int(seq), packed=packed)
        except ValueError as error:
            self._count_bad(f"snapshot of {worker_id}", error)
            return None

    async def stream_position(self) -> StreamPosition:
        with unavailable_on_error("read the stream's end"):
            newest: Any = await self._client.xrevrange(self._keys.events, count=1)
        return _position(newest[0][0]) if newest else StreamPosition(0, 0)

    async def follow(self, position: StreamPosition, block_ms: int) -> list[StreamEntry]:
        block_ms = min(max(1, block_ms), self._longest_block_ms)  # 0 would mean forever
        with unavailable_on_error("follow the stream"):
            answer: Any = await self._client.xread(
                {self._keys.events: str(position)}, count=ENTRIES_PER_READ, block=block_ms
            )
        if not answer:
            return []
        entries: list[StreamEntry] = []
        unparsed_bytes = 0
        for entry_id, values in answer[0][1]:
            entries.append(StreamEntry(_position(entry_id), self._parse(values)))
            unparsed_bytes += sum(len(value) for value in values.values()) if values else 0
            if unparsed_bytes > _BYTES_PER_SLICE:
                unparsed_bytes = 0
                await asyncio.sleep(0)
        return entries

    async def close(self) -> None:
        await self._client.aclose()

    def _parse(self, values: dict[bytes, bytes] | None) -> IndexEntry | None:
        try:
            if not values or set(values) != {b"entry"}:
                raise BadPayload("an entry without its one field")
            return decode_entry(values[b"entry"])
        except BadPayload as error:
            self._count_bad("stream entry", error)
            return None

    def _count_bad(self, what: str, reason: object) -> None:
        self._bad_payloads += 1
        level = logging.WARNING if self._bad_payloads == 1 else logging.DEBUG
        logger.log(level, "skipped a bad payload in the index, number %d: %s: %s", self._bad_payloads, what, reason)


def _position(entry_id: bytes) -> StreamPosition:
    try:
        ms, seq = entry_id.split(b"-")
        return StreamPosition(int(ms), int(seq))
    except ValueError as error:
        raise IndexUnavailable(f"{entry_id!r} is not a stream id") from error
