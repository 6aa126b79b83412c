"""IndexKeys: every Redis key of the index, built in one place.

    kvray:1:{model}:workers         set     ids of registered workers
    kvray:1:{model}:epoch           string  the highest epoch ever given out, so that epochs never repeat
    kvray:1:{model}:events          stream  one entry per published batch
    kvray:1:{model}:worker:<id>     hash    epoch, seq, info of the current life
    kvray:1:{model}:chunks:<id>     set     16-byte hashes of the chunks that it holds
    kvray:1:{model}:beat:<id>       string  epoch and load, expires with the heartbeat

Owns: the names, the schema version in them, and the one hash tag per model.
Does not: know what is stored under a key (cluster.index.wire, the scripts).
Invariants: all keys of a model share one hash tag, so a script touches one cluster slot; no two models share a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from cluster.core.replica import WorkerId

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexKeys:
    """Keys of one model under one prefix. The model's name may hold any characters."""

    prefix: str
    model: str

    @property
    def workers(self) -> str:
        return self._key("workers")

    @property
    def epoch(self) -> str:
        return self._key("epoch")

    @property
    def events(self) -> str:
        return self._key("events")

    @property
    def worker_prefix(self) -> str:
        return self._key("worker:")

    def worker(self, worker_id: WorkerId) -> str:
        return self.worker_prefix + worker_id

    def chunks(self, worker_id: WorkerId) -> str:
        return self._key("chunks:") + worker_id

    def beat(self, worker_id: WorkerId) -> str:
        return self._key("beat:") + worker_id

    def _key(self, name: str) -> str:
        return f"{self.prefix}:{SCHEMA_VERSION}:{{{quote(self.model, safe='')}}}:{name}"
