"""RedisReader: a router's side of the index in Redis.

Owns: reading registrations, heartbeats, snapshots and the stream, and counting what cannot be parsed.
Does not: keep state between calls, or decide what to do about gaps (cluster.index.follower).
Invariants: bad bytes in Redis never raise: they are counted and skipped; no answer is longer than one page or one
batch of entries, so the event loop is never held up for long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any

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
from cluster.index.redis_link import RedisLink
from cluster.index.wire import BadPayload, decode_entry, decode_heartbeat, decode_info

logger = logging.getLogger(__name__)

ENTRIES_PER_READ = 128
CHUNKS_PER_PAGE = 2048
MAX_SNAPSHOT_CHUNKS = 2**24  # repeated ones included; more is no cache of ours
_BYTES_PER_SLICE = 32 * 1024  # parsed between two turns of the event loop


class RedisReader:
    """The `IndexReader` over Redis; closes the client that it was given."""

    def __init__(self, link: RedisLink, keys: IndexKeys) -> None:
        self._link = link
        self._keys = keys
        self._longest_block_ms = max(1, int(link.timeout_s * 500))
        self._bad_payloads = 0

    @classmethod
    def open(cls, config: IndexConfig, url: str, model: str) -> RedisReader:
        return cls(RedisLink(url, config.timeout_s), IndexKeys(prefix=config.key_prefix, model=model))

    @property
    def bad_payloads(self) -> int:
        return self._bad_payloads

    async def workers(self) -> dict[WorkerId, Registration]:
        async with self._link.use("list workers") as client:
            members: Any = await client.smembers(self._keys.workers)
            worker_ids = [WorkerId(member.decode(errors="replace")) for member in sorted(members)]
            async with client.pipeline(transaction=False) as pipeline:
                for worker_id in worker_ids:
                    pipeline.hmget(self._keys.worker(worker_id), ["epoch", "seq", "info"])
                rows: list[list[bytes | None]] = await pipeline.execute()
        found: dict[WorkerId, Registration] = {}
        for worker_id, (epoch, seq, info) in zip(worker_ids, rows, strict=True):
            if epoch is None or seq is None or info is None:
                continue
            try:
                registration = Registration(epoch=Epoch(_count(epoch)), seq=_count(seq), info=decode_info(info))
            except BadPayload as error:
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
        async with self._link.use("read heartbeats") as client:
            payloads: Any = await client.mget([self._keys.beat(worker_id) for worker_id in worker_ids])
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
        """Pages of SSCAN over one connection, because a cursor means nothing to another server.

        SSCAN returns every member that was there all the time, and none that never was; the others are those that the
        entries between the first page's seq and the last one's name. A seq that goes back is a lost history.
        """
        keys = [self._keys.worker(worker_id), self._keys.chunks(worker_id)]
        pages: list[bytes] = []
        first: tuple[int, int] | None = None
        epoch, seq, cursor, room = 0, 0, b"0", MAX_SNAPSHOT_CHUNKS * HASH_BYTES
        async with self._link.pinned("read a snapshot", keys[0]) as scripts:
            while first is None or cursor != b"0":
                answer = await scripts.run("snapshot", keys, [cursor, CHUNKS_PER_PAGE])
                if answer is None:
                    return None
                try:
                    epoch, seq_now, cursor, page = _count(answer[0]), _count(answer[1]), bytes(answer[2]), answer[3]
                except BadPayload as error:
                    self._count_bad(f"snapshot of {worker_id}", error)
                    return None
                if first is not None and (epoch != first[0] or seq_now < seq):
                    return None
                first, seq, room = first or (epoch, seq_now), seq_now, room - len(page)
                if room < 0:
                    self._count_bad(f"snapshot of {worker_id}", f"more than {MAX_SNAPSHOT_CHUNKS} chunks")
                    return None
                for _ in range(answer[4]):
                    self._count_bad(f"snapshot of {worker_id}", "a chunk hash is not whole")
                pages.append(page)
        return Snapshot(epoch=Epoch(epoch), seq=first[1], settled=seq, pages=tuple(pages))

    async def stream_position(self) -> StreamPosition:
        async with self._link.use("read the stream's end") as client:
            newest: Any = await client.xrevrange(self._keys.events, count=1)
        return _position(newest[0][0]) if newest else StreamPosition(0, 0)

    async def server_time_s(self) -> float:
        return int(await self._link.run("tell the time", "clock", [self._keys.events])) / 1e6

    async def follow(self, position: StreamPosition, block_ms: int) -> list[StreamEntry]:
        block_ms = min(max(1, block_ms), self._longest_block_ms)  # 0 would mean forever
        async with self._link.use("follow the stream") as client:
            answer: Any = await client.xread({self._keys.events: str(position)}, count=ENTRIES_PER_READ, block=block_ms)
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
        await self._link.close()

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


def _count(text: bytes) -> int:
    if not 0 < len(text) <= 19 or not text.isdigit():
        raise BadPayload("expected a count")
    return int(text)


def _position(entry_id: bytes) -> StreamPosition:
    try:
        ms, seq = entry_id.split(b"-")
        return StreamPosition(int(ms), int(seq))
    except ValueError as error:
        raise IndexUnavailable(f"{entry_id!r} is not a stream id") from error
