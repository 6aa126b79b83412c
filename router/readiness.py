"""Readiness: whether this front door can serve a request now, and what keeps each replica from it.

    ready            registered, which a replica does once its weights are in and its kernels are warm
    draining         it finishes what it has and is about to stop
    paused           it takes requests and runs none
    lost             it died or its engine did, and it has not registered again
    not offered      registered, but Serve does not send requests there: it has just started, or is being stopped
    not registered   Serve has it, the index does not

Owns: these words and the judgement.
Does not: gather the facts (router.routing_state) or answer probes (router.http_api, router.grpc_api).
Invariants: ready means that the index snapshot is in and at least one replica is ready or a request would bring one up;
`reason` says what to wait for, or what a request would wait for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.core.replica import ReplicaLoad, WorkerId
from cluster.index.known import FollowerState

READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """replicas: the word for each.  index: the state of the index's feed."""

    ready: bool
    reason: str
    index: FollowerState
    replicas: Mapping[WorkerId, str]

    def body(self) -> dict[str, Any]:
        """For JSON."""
        reason = {"reason": self.reason} if self.reason else {}
        status = "ready" if self.ready else "not ready"
        return {"status": status, **reason, "index": str(self.index), "replicas": dict(self.replicas)}


def judge(
    *,
    snapshot_in: bool,
    index: FollowerState,
    loads: Mapping[WorkerId, ReplicaLoad],
    offered: Collection[WorkerId] | None,
    lost: Collection[WorkerId],
    starts_replicas: bool = False,
) -> Readiness:
    """`loads`: of all registered replicas.  `offered`: those that Serve sends requests to; None while it has not said.

    `lost`: those that failed; one that is registered again is not.  `starts_replicas`: a request brings one up and
    waits for it, so that none is no reason not to be ready."""
    replicas = {worker_id: _word(load, offered is None or worker_id in offered) for worker_id, load in loads.items()}
    for worker_id in offered or ():
        replicas.setdefault(worker_id, "lost" if worker_id in lost else "not registered")
    able = READY in replicas.values()
    if not snapshot_in:
        reason = "the index has not been read yet"
    elif able:
        reason = ""
    elif starts_replicas:
        reason = "no replica is ready: a request starts one and waits for it"
    elif replicas:
        reason = "no replica is ready"
    else:
        reason = "no replica is there yet"
    return Readiness(ready=snapshot_in and (able or starts_replicas), reason=reason, index=index, replicas=replicas)


def _word(load: ReplicaLoad, offered: bool) -> str:
    if load.draining:
        return "draining"
    if not offered:
        return "not offered"
    return "paused" if load.paused else READY
