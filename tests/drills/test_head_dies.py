"""The Ray head dies as a whole under load and comes back: front doors and replicas on the other nodes go on.

Long (some minutes), needs root for network namespaces: `make test-long`. The log of a run is docs/drills/head.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import network_hosts
import pytest
from drill_load import DrillLoad
from network_cluster import NetworkCluster
from patience import eventually
from serve_operator import Seen

from cluster.config import ClusterConfig

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.redis,
    pytest.mark.timeout(1500),
    pytest.mark.skipif("KVRAY_LONG" not in os.environ, reason="long: make test-long"),
]

OUTAGE_S = 10.0
WHOLE_AGAIN_S = 60.0
TOKENS = 400


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
    eventually(lambda: is_whole(hosts.look()), "two nodes, two replicas of each kind", 60)
    said: list[str] = []
    steady = load(hosts, "nodes", hosts.node_doors, clients=3, tokens=TOKENS, pause_s=0.0)
    at_the_head = load(hosts, "head", [hosts.head_door], clients=1, tokens=4, pause_s=0.2)
    with steady, at_the_head:
        steady.answer_more(12)
        at_the_head.answer_more(2)
        killed_at = time.time()
        killed = hosts.kill_head()
        said.append(f"killed {len(killed)} processes of the head in {time.time() - killed_at:.1f} s")
        steady.answer_more(12)
        eventually(lambda: time.time() - killed_at > OUTAGE_S, "the outage", OUTAGE_S + 1)
        steady.answer_more(12)
        started_at = time.time()
        hosts.start_head()
        said.append(f"{time.time() - killed_at:.1f} s: the head is up, after {time.time() - started_at:.1f} s of start")
        eventually(lambda: is_whole(hosts.look()), "Serve has all its replicas", 180)
        recovered_s = time.time() - killed_at
        said.append(f"{recovered_s:.1f} s: Serve's controller tells of all replicas running")
        eventually(lambda: opened(at_the_head, started_at), "the head's front door answers", 180)
        opened_s = opened(at_the_head, started_at) - killed_at
        said.append(f"{opened_s:.1f} s: the head's front door answers")
        steady.answer_more(12)
        asked, failures = steady.end(), steady.failures()
    lost = hosts.kill_a_worker()
    eventually(lambda: hosts.look().running() < 2, "Serve notices that a replica died", 60)
    eventually(lambda: is_whole(hosts.look()), "the new controller replaces a replica that dies", 120)
    said.append(f"replica {lost} was killed then, and replaced")
    during = [one for one in asked if killed_at < one.began < started_at]
    across = [one for one in asked if one.began < killed_at < one.ended]
    said.append(f"{len(asked)} requests at the nodes, {len(during)} begun without a head, {len(across)} across")
    said.append(f"failures: {[one.error or 'short' for one in failures]}")
    print("\n".join(said))
    assert failures == []
    assert across and during
    assert max(recovered_s, opened_s) < WHOLE_AGAIN_S


def load(
    hosts: NetworkCluster, name: str, addresses: Sequence[str], *, clients: int, tokens: int, pause_s: float
) -> DrillLoad:
    """From a machine of its own."""
    return DrillLoad(
        addresses,
        clients=clients,
        tokens=tokens,
        folder=hosts.folder,
        name=name,
        env=hosts.env,
        pause_s=pause_s,
        inside=hosts.network.switch.inside,
    )


def opened(load: DrillLoad, since: float) -> float:
    """When the first request that was begun after `since` was answered; 0 while none was."""
    return min((one.ended for one in load.asked() if one.began > since and one.error is None), default=0.0)


def is_whole(seen: Seen) -> bool:
    return seen.nodes == 3 and all(seen.running(name) == seen.total(name) == 2 for name in ("LLMWorker", "Ingress"))
