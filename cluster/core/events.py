"""Cache events: what a replica's prefix cache gained and lost, in chunks.

Owns: CacheEvent and its kinds.
Does not: number or transport events (worker.cache_reporter, cluster.index).
Invariants: stored lists parents before children, removed lists children before parents, cleared lists nothing;
a chunk is stored exactly when its last block enters the tree and removed when that block leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cluster.core.hashing import ChunkHash


class CacheEventKind(StrEnum):
    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    kind: CacheEventKind
    chunk_hashes: tuple[ChunkHash, ...] = ()

    def to_wire(self) -> list[Any]:
        return [str(self.kind), list(self.chunk_hashes)]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> CacheEvent:
        kind, hashes = wire
        return cls(CacheEventKind(kind), tuple(hashes))
