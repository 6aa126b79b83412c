"""The contracts of the index: what the router asks of it, and what feeds it.

Owns: ChunkIndex (the question: how many chunks of this prompt does each replica hold?), the IndexWriter and
IndexReader seams to the shared truth, their values and their errors.
Does not: talk to Redis, or score.
Invariants: an entry of an unknown or retired (worker, epoch) changes nothing; lookups see only live workers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cluster.core.errors import KvrayError
from cluster.core.events import CacheEvent
from cluster.core.hashing import HASH_BYTES, ChunkHash
from cluster.core.replica import Epoch, ReplicaInfo, ReplicaLoad, WorkerId

MAX_CHUNKS_PER_ENTRY = 1024


class IndexUnavailable(KvrayError):
    """The shared index cannot be reached or refuses to work; try again later."""

    code = "index_unavailable"


class RegistrationGone(KvrayError):
    """The shared index does not know the worker any more: register again and publish everything."""

    code = "registration_gone"


class Fenced(KvrayError):
    """This life was replaced, or its numbering broke: register again and publish everything."""

    code = "fenced"


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One published batch: events of (worker, epoch), numbered without gaps from seq 1 within an epoch."""

    worker_id: WorkerId
    epoch: Epoch
    seq: int
    events: tuple[CacheEvent, ...]


class StreamPosition(NamedTuple):
    """A place in the event stream; later places compare greater."""

    ms: int
    seq: int

    def __str__(self) -> str:
        return f"{self.ms}-{self.seq}"


class StreamEntry(NamedTuple):
    """What stands at a place of the stream. `entry` is None when it could not be parsed."""

    position: StreamPosition
    entry: IndexEntry | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A worker's current life as the shared index knows it; `seq` is the last entry it published."""

    epoch: Epoch
    seq: int
    info: ReplicaInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    epoch: Epoch
    load: ReplicaLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All chunks of one life after entry `seq`, in no order. `packed` is their hashes, end to end."""

    epoch: Epoch
    seq: int
    packed: bytes

    def __len__(self) -> int:
        return len(self.packed) // HASH_BYTES

    def batches(self, size: int = MAX_CHUNKS_PER_ENTRY) -> Iterator[tuple[ChunkHash, ...]]:
        """The hashes in tuples of at most `size`, unpacked one tuple at a time."""
        for start in range(0, len(self.packed), size * HASH_BYTES):
            yield unpack_hashes(self.packed[start : start + size * HASH_BYTES])


def unpack_hashes(packed: bytes) -> tuple[ChunkHash, ...]:
    return tuple(ChunkHash(packed[at : at + HASH_BYTES]) for at in range(0, len(packed), HASH_BYTES))


class ChunkIndex(Protocol):
    """Thread-confined: one owner, the router's event loop."""

    def add_worker(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Start a life with an empty cache. A higher epoch purges the lower one; any other is ignored."""

    def drop_worker(self, worker_id: WorkerId) -> None:
        """Forget the worker and all it held. Unknown ids are ignored."""

    def apply(self, worker_id: WorkerId, epoch: Epoch, events: Sequence[CacheEvent]) -> None:
        """Apply events in order. Ignored unless (worker, epoch) is the live life."""

    def overlaps(self, chunk_hashes: Sequence[ChunkHash]) -> dict[WorkerId, int]:
        """Worker -> number of leading chunks it holds, for every live worker with at least one."""

    def sweep(self, limit: int) -> bool:
        """Free up to `limit` records of purged lives. True while some are left."""


class IndexWriter(Protocol):
    """A worker's side of the shared index. Every call may raise `IndexUnavailable`."""

    async def register(self, info: ReplicaInfo) -> Epoch:
        """Begin a new life with no chunks and seq 0; ends the worker's earlier one."""

    async def publish(self, worker_id: WorkerId, epoch: Epoch, seq: int, events: Sequence[CacheEvent]) -> None:
        """Append one entry of at most MAX_CHUNKS_PER_ENTRY chunks. Raises `Fenced` or `RegistrationGone`."""

    async def heartbeat(self, worker_id: WorkerId, epoch: Epoch, load: ReplicaLoad) -> None:
        """Say "alive" for one TTL. Raises `Fenced` or `RegistrationGone`."""

    async def deregister(self, worker_id: WorkerId, epoch: Epoch) -> bool:
        """Remove this life. False when it was not the current one; then nothing changes."""


class IndexReader(Protocol):
    """A router's side of the shared index. Every call may raise `IndexUnavailable`."""

    @property
    def bad_payloads(self) -> int:
        """How many payloads were skipped because they could not be parsed."""

    async def workers(self) -> dict[WorkerId, Registration]: ...

    async def heartbeats(self, worker_ids: Collection[WorkerId]) -> dict[WorkerId, Heartbeat]:
        """The beats that have not expired."""

    async def snapshot(self, worker_id: WorkerId) -> Snapshot | None:
        """Epoch, seq and chunks read in one instant; None when the worker is not registered."""

    async def stream_position(self) -> StreamPosition:
        """The place of the newest entry; (0, 0) for an empty stream."""

    async def follow(self, position: StreamPosition, block_ms: int) -> list[StreamEntry]:
        """Entries after `position`, a bounded number; waits up to `block_ms` for the first."""
