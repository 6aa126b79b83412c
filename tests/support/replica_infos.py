"""A replica's registration, where a test cares for little of it."""

from __future__ import annotations

from typing import Any

from cluster.core.replica import ReplicaInfo, WorkerId


def replica_info(worker_id: str, **changes: Any) -> ReplicaInfo:
    values: dict[str, Any] = {
        "route_digest": "d",
        "kv_fingerprint": "f",
        "block_size": 16,
        "chunk_tokens": 64,
        "num_blocks": 8,
        "max_model_len": 512,
        "model": "m",
    }
    return ReplicaInfo(worker_id=WorkerId(worker_id), **values | changes)
