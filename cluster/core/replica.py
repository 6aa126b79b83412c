"""What the cluster knows about one replica: who it is, and how busy it is.

Owns: WorkerId, Epoch, ReplicaInfo (static for one life) and ReplicaLoad (the heartbeat's content).
Does not: store or send them (cluster.index).
Invariants: token counts are of *uncached* tokens still to prefill; block counts add up:
free + cached + in use = total.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, NewType

WorkerId = NewType("WorkerId", str)
Epoch = NewType("Epoch", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """Facts that hold for one life of a replica; written at registration.

    route_digest: `RouteScheme.digest` of the unsalted scheme.  kv_fingerprint: digest guarding imported KV.
    incarnation: drawn once per process, the same in all its registrations; with another one its requests are lost.
    """

    worker_id: WorkerId
    route_digest: str
    kv_fingerprint: str
    block_size: int
    chunk_tokens: int
    num_blocks: int
    max_model_len: int
    model: str
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    dtype: str = ""
    incarnation: str = ""

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> ReplicaInfo:
        return cls(**{f.name: wire[f.name] for f in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """A snapshot of one engine's work and memory.

    uncached_tokens: router id -> uncached prompt tokens, queued or running, still to prefill.
    held: of the waiting ones, those that wait for a prefix which is being computed.  paused: it takes requests and
    runs none.  draining: it takes no more requests and is about to stop.  prefill_tokens_per_s: recent measured rate,
    0 while unknown.  step_time_s: recent mean step time.
    step_time_model: the coefficients of cluster.core.step_time, nothing while unknown.  loaded_s: since start, of steps
    that prefilled or left somebody waiting.
    query_tokens / hit_tokens: prompt tokens looked up and found since start, each request counted once.
    expired_requests: ended by their deadline.  refused_requests: not let in.
    """

    waiting: int = 0
    held: int = 0
    running: int = 0
    paused: bool = False
    draining: bool = False
    uncached_tokens: dict[str, int] = field(default_factory=dict)
    free_blocks: int = 0
    cached_blocks: int = 0
    in_use_blocks: int = 0
    total_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    step_time_s: float = 0.0
    step_time_model: tuple[float, ...] = ()
    loaded_s: float = 0.0
    query_tokens: int = 0
    hit_tokens: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    expired_requests: int = 0
    refused_requests: int = 0
    preemptions: int = 0

    @property
    def total_uncached_tokens(self) -> int:
        return sum(self.uncached_tokens.values())

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> ReplicaLoad:
        known = {f.name: wire[f.name] for f in fields(cls) if f.name in wire}
        return cls(**known | {"step_time_model": tuple(wire.get("step_time_model", ()))})
