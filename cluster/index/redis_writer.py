"""RedisWriter: a worker's side of the index in Redis.

Owns: the calls of the register, publish, heartbeat and deregister scripts, and how long a silent worker's keys live.
Does not: number, batch or repeat anything (worker.cache_reporter).
Invariants: a worker's set of chunks, its seq and the stream change together or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config import IndexConfig
from cluster.core.events import CacheEvent
from cluster.core.replica import Epoch, ReplicaInfo, ReplicaLoad, WorkerId
from cluster.index.base import NO_EPOCH, Fenced, IndexUnavailable, RegistrationGone
from cluster.index.keys import IndexKeys
from cluster.index.redis_link import RedisLink
from cluster.index.wire import encode_entry, encode_heartbeat, encode_info

# A worker without heartbeats is out of every router's index after one TTL; its keys stay so many TTLs, for a worker
# that was only cut off, and then expire so that dead workers leave nothing behind.
GRACE_TTLS = 100


class RedisWriter:
    """The `IndexWriter` over Redis; closes the link that it was given."""

    def __init__(self, link: RedisLink, keys: IndexKeys, config: IndexConfig) -> None:
        self._link = link
        self._keys = keys
        self._ttl_ms = max(1, int(config.heartbeat_ttl_s * 1000))
        self._grace_ms = self._ttl_ms * GRACE_TTLS
        self._stream_max_entries = config.stream_max_entries

    @classmethod
    def open(cls, config: IndexConfig, url: str, model: str) -> RedisWriter:
        keys = IndexKeys(prefix=config.key_prefix, model=model)
        return cls(RedisLink(url, config.timeout_s), keys, config)

    async def register(self, info: ReplicaInfo, after: Epoch = NO_EPOCH) -> Epoch:
        keys = self._keys
        worker_id = info.worker_id
        epoch = await self._link.run(
            "register a worker",
            "register",
            [keys.workers, keys.worker(worker_id), keys.chunks(worker_id), keys.beat(worker_id), keys.epoch],
            [worker_id, encode_info(info), self._grace_ms, keys.worker_prefix, after],
        )
        return Epoch(int(epoch))

    async def publish(self, worker_id: WorkerId, epoch: Epoch, seq: int, events: Sequence[CacheEvent]) -> None:
        keys = self._keys
        payload = encode_entry(worker_id, epoch, seq, events)
        changes = [part for event in events for part in (str(event.kind), b"".join(event.chunk_hashes))]
        status = await self._link.run(
            "publish cache events",
            "publish",
            [keys.worker(worker_id), keys.chunks(worker_id), keys.events],
            [epoch, seq, payload, self._stream_max_entries, self._grace_ms, *changes],
        )
        _raise_unless_ok(status, worker_id, epoch)

    async def heartbeat(self, worker_id: WorkerId, epoch: Epoch, load: ReplicaLoad, seq: int = 0) -> None:
        keys = self._keys
        status = await self._link.run(
            "take a heartbeat",
            "heartbeat",
            [keys.worker(worker_id), keys.chunks(worker_id), keys.beat(worker_id)],
            [epoch, encode_heartbeat(epoch, load), self._ttl_ms, self._grace_ms, seq],
        )
        _raise_unless_ok(status, worker_id, epoch)

    async def deregister(self, worker_id: WorkerId, epoch: Epoch) -> bool:
        keys = self._keys
        status = await self._link.run(
            "deregister a worker",
            "deregister",
            [keys.workers, keys.worker(worker_id), keys.chunks(worker_id), keys.beat(worker_id)],
            [worker_id, epoch],
        )
        return bool(status == b"ok")

    async def close(self) -> None:
        await self._link.close()


def _raise_unless_ok(status: object, worker_id: WorkerId, epoch: Epoch) -> None:
    if status == b"gone":
        raise RegistrationGone(f"worker {worker_id} is not registered any more")
    if status == b"fenced":
        raise Fenced(f"epoch {epoch} of worker {worker_id} may not publish any more")
    if status != b"ok":
        raise IndexUnavailable(f"unexpected answer of a script: {status!r}")
