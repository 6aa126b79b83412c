"""Whether a request would be served now, and what keeps each replica from it."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.core.replica import ReplicaLoad, WorkerId
from cluster.index.known import FollowerState
from router.readiness import Readiness, judge

A, B = WorkerId("a"), WorkerId("b")
IDLE = ReplicaLoad()


def look(
    *loads: ReplicaLoad,
    offered: list[WorkerId] | None = None,
    lost: set[WorkerId] | None = None,
    snapshot_in: bool = True,
) -> Readiness:
    return judge(
        snapshot_in=snapshot_in,
        index=FollowerState.FOLLOWING,
        loads=dict(zip((A, B), loads, strict=False)),
        offered=offered,
        lost=lost or set(),
    )


@pytest.mark.parametrize(
    "load,offered,word",
    [
        (IDLE, None, "ready"),
        (IDLE, [A], "ready"),
        (IDLE, [], "not offered"),
        (ReplicaLoad(draining=True), [A], "draining"),
        (ReplicaLoad(draining=True), [], "draining"),
        (ReplicaLoad(paused=True), [A], "paused"),
    ],
)
def test_one_replica(load: ReplicaLoad, offered: list[WorkerId] | None, word: str) -> None:
    found = look(load, offered=offered)
    assert (found.replicas, found.ready) == ({A: word}, word == "ready")
    assert found.reason == ("" if found.ready else "no replica is ready")


def test_one_ready_replica_is_enough() -> None:
    found = look(ReplicaLoad(draining=True), IDLE)
    assert found.ready and found.replicas == {A: "draining", B: "ready"}


def test_what_serve_has_and_the_index_has_not() -> None:
    assert look(offered=[A, B], lost={B}).replicas == {A: "not registered", B: "lost"}
    assert look(IDLE, offered=[A], lost={A}).ready, "it has registered again"


def test_the_snapshot_comes_first() -> None:
    found = look(IDLE, snapshot_in=False)
    assert (found.ready, found.reason) == (False, "the index has not been read yet")
    assert look().reason == "no replica is there yet"
    assert found.body() == {
        "status": "not ready",
        "reason": "the index has not been read yet",
        "index": "following",
        "replicas": {"a": "ready"},
    }


def test_a_fleet_that_starts_on_demand_is_ready_without_replicas() -> None:
    facts: dict[str, Any] = {"index": FollowerState.FOLLOWING, "loads": {}, "offered": None, "lost": ()}
    found = judge(snapshot_in=True, starts_replicas=True, **facts)
    assert found.ready
    assert found.body() == {
        "status": "ready",
        "reason": "no replica is ready: a request starts one and waits for it",
        "index": "following",
        "replicas": {},
    }
    served = judge(snapshot_in=True, starts_replicas=True, **{**facts, "loads": {A: IDLE}})
    assert (served.ready, served.reason) == (True, "")
    assert not judge(snapshot_in=True, starts_replicas=False, **facts).ready
    assert not judge(snapshot_in=False, starts_replicas=True, **facts).ready
