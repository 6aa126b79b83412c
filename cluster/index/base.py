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
NO_EPOCH = Epoch(0)  # before every life


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

    @property
    def records(self) -> int:
        """What it costs to apply: its chunks, and one for itself."""
        return 1 + sum(len(event.chunk_hashes) for event in self.events)


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
    """The chunks of one life, in no order, read page by page while entries went on.

    A chunk that no entry of seq + 1 ... settled names is here exactly when it was held at `seq`; any other may be here
    or not. So: take all of these, apply those entries in order, and the content is exact as of `settled`. A set that
    fitted on one page was read in one instant: settled = seq.
    """

    epoch: Epoch
    seq: int
    settled: int
    pages: tuple[bytes, ...]

    def __len__(self) -> int:
        """How many hashes there are, repeated ones included."""
        return sum(map(len, self.pages)) // HASH_BYTES

    def batches(self, size: int = MAX_CHUNKS_PER_ENTRY) -> Iterator[tuple[ChunkHash, ...]]:
        """The hashes in tuples of at most `size`, unpacked one tuple at a time."""
        for page in self.pages:
            for start in range(0, len(page), size * HASH_BYTES):
                yield unpack_hashes(page[start : start + size * HASH_BYTES])


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
        """Worker -> number of leading chunks it holds, for every live worker with at least one.

        Exact while what a worker holds is closed under prefix, as it is between any two entries. With holes, as while a
        snapshot is loaded, the number is that of some chunk which the worker holds and whose next it does not.
        """

    def sweep(self, limit: int) -> bool:
        """Free records of purged lives: a piece of work in proportion to `limit`. True while some are left."""


class IndexWriter(Protocol):
    """A worker's side of the shared index. Every call may raise `IndexUnavailable`."""

    async def register(self, info: ReplicaInfo, after: Epoch = NO_EPOCH) -> Epoch:
        """Begin a new life with no chunks and seq 0; ends the worker's earlier one. Its epoch is higher than all
        before, `after` included: the worker's own last one, which a server that took over may not know."""

    async def publish(self, worker_id: WorkerId, epoch: Epoch, seq: int, events: Sequence[CacheEvent]) -> None:
        """Append one entry of at most MAX_CHUNKS_PER_ENTRY chunks. Raises `Fenced` or `RegistrationGone`."""

    async def heartbeat(self, worker_id: WorkerId, epoch: Epoch, load: ReplicaLoad, seq: int = 0) -> None:
        """Say "alive" for one TTL. `seq` is the last entry that was acknowledged: an index that has not got so far
        lost entries. Raises `Fenced` or `RegistrationGone`."""

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
        """None when the worker is not registered, or began a new life meanwhile."""

    async def stream_position(self) -> StreamPosition:
        """The place of the newest entry; (0, 0) for an empty stream."""

    async def server_time_s(self) -> float:
        """The clock that stamps the stream's entries, in seconds since 1970."""

    async def follow(self, position: StreamPosition, block_ms: int) -> list[StreamEntry]:
        """Entries after `position`, a bounded number; waits up to `block_ms` for the first."""
