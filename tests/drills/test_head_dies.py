"""The Ray head dies as a whole under load and comes back: front doors and replicas on the other nodes go on.

Long (some minutes), needs root for network namespaces: `make test-long`. The log of a run is docs/drills/head.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import network_hosts
import pytest
from drill_load import DrillLoad
from network_cluster import NetworkCluster
from serve_operator import Seen

from cluster.config import ClusterConfig

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.redis,
    pytest.mark.timeout(540),
    pytest.mark.skipif("KVRAY_LONG" not in os.environ, reason="long: make test-long"),
]

OUTAGE_S = 10.0
WHOLE_AGAIN_S = 60.0
TOKENS = 200


@pytest.fixture
def hosts(tiny_llama_dir: Path) -> Iterator[NetworkCluster]:
    reason = network_hosts.why_not()
    if reason is not None:
        pytest.skip(reason)
    config = ClusterConfig.model_validate(
        {
            "engine": {"model": str(tiny_llama_dir), "threads": 1, "cache": {"kv_memory": "16MiB"}},
            "router": {"replicas": 2},
            "serve": {"replicas": 2, "drain_s": 20, "cpus_per_replica": 0.5},
            "served_model_name": "tiny",
        }
    )
    with NetworkCluster(config, nodes=2) as cluster:
        yield cluster


def test_the_head_dies(hosts: NetworkCluster) -> None:
    before = hosts.look()
    assert is_whole(before)
    said: list[str] = []
    load = DrillLoad(
        hosts.node_doors,
        clients=4,
        tokens=TOKENS,
        folder=hosts.folder,
        name="load",
        env=hosts.env,
        inside=hosts.network.switch.inside,
    )
    with load:
        answered(load, 12)
        killed_at = time.time()
        killed = hosts.kill_head()
        said.append(f"killed {len(killed)} processes of the head in {time.time() - killed_at:.2f} s")
        answered(load, 12)
        eventually(lambda: time.time() - killed_at > OUTAGE_S, "the outage", OUTAGE_S + 1)
        answered(load, 12)
        started_at = time.time()
        hosts.start_head()
        said.append(
            f"head up {time.time() - killed_at:.1f} s after its death, {time.time() - started_at:.1f} s to start"
        )
        hosts.connect()
        eventually(lambda: is_whole(hosts.look()), "whole again", 120)
        whole_s = time.time() - killed_at
        said.append(f"whole again {whole_s:.1f} s after the head's death")
        answered(load, 12)
        asked = load.end()
    failures = load.failures()
    during = [one for one in asked if killed_at < one.began < started_at]
    across = [one for one in asked if one.began < killed_at < one.ended]
    said.append(f"{len(asked)} requests, {len(during)} begun during the outage, {len(across)} streams across the death")
    said.append(f"failures: {[one.error or 'short' for one in failures]}")
    print("\n".join(said))
    assert failures == []
    assert across and during
    assert whole_s < WHOLE_AGAIN_S


def is_whole(seen: Seen) -> bool:
    return seen.nodes == 3 and all(seen.running(name) == seen.total(name) == 2 for name in ("LLMWorker", "Ingress"))


def answered(load: DrillLoad, more: int) -> None:
    wanted = len(load.asked()) + more
    eventually(lambda: len(load.asked()) >= wanted or load.failures(), f"{more} more answers", 60)
    assert load.failures() == []


def eventually(condition: Callable[[], object], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)
