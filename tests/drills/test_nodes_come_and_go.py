"""Load rises: nodes and replicas come. Load falls: they go. No request fails, and streams on what goes are finished.

Real autoscaling of replicas (our policy in Serve) and of nodes (Ray's autoscaler, whose provider starts raylets with
pretended GPUs on this machine). Long: `make test-long`. The log of a run is docs/drills/scaling.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from drill_cluster import DrillCluster
from drill_load import DrillLoad
from serve_operator import Seen

from cluster.config import ClusterConfig

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.redis,
    pytest.mark.timeout(1500),
    pytest.mark.skipif("KVRAY_LONG" not in os.environ, reason="long: make test-long"),
]

MOST = 3
RAMP_S = 400.0
TOKENS = 300


class Watch:
    """What was seen of the cluster, change by change."""

    def __init__(self, cluster: DrillCluster) -> None:
        self._cluster = cluster
        self._began = time.monotonic()
        self.changes: list[tuple[float, int, int, int]] = []  # seconds, nodes, replicas running, replicas wanted

    def look(self) -> Seen:
        seen = self._cluster.operator.look()
        states = seen.replicas.get("LLMWorker", {})
        wanted = sum(number for state, number in states.items() if state != "STOPPING")
        now = (seen.nodes, seen.running(), wanted)
        if not self.changes or self.changes[-1][1:] != now:
            self.changes.append((time.monotonic() - self._began, *now))
            print("t={:5.1f}s nodes={} running={} wanted={}".format(*self.changes[-1]), flush=True)
        return seen

    def until(self, condition: Callable[[Seen], bool], what: str) -> None:
        deadline = time.monotonic() + RAMP_S
        while not condition(self.look()):
            assert time.monotonic() < deadline, f"not within {RAMP_S} s: {what}; {self.changes}"
            time.sleep(0.5)


@pytest.fixture
def elastic(tiny_llama_dir: Path) -> Iterator[DrillCluster]:
    config = ClusterConfig.model_validate(
        {
            "engine": {
                "model": str(tiny_llama_dir),
                "device": "cpu",
                "threads": 1,
                "max_num_seqs": 5,
                "cache": {"kv_memory": "16MiB"},
            },
            "autoscaling": {
                "min_replicas": 1,
                "max_replicas": MOST,
                "utilisation": 0.5,
                "margin": 0,
                "look_back_s": 5,
                "up_delay_s": 2,
                "down_delay_s": 15,
                "start_s": 10,
            },
            "serve": {"replicas": 1, "drain_s": 30, "cpus_per_replica": 0.5, "gpus_per_replica": 1},
            "served_model_name": "tiny",
        }
    )
    with DrillCluster(config, head_cpus=1, gpu_nodes=MOST) as cluster:
        yield cluster


def test_nodes_come_and_go_with_the_load(elastic: DrillCluster) -> None:
    watch = Watch(elastic)
    watch.until(lambda seen: seen.nodes == 2 and seen.running() == 1, "one replica, on a node that came for it")
    # Three clients are work for one replica of five seats; fifteen are for more than three.
    with load(elastic, "steady", clients=3) as steady, load(elastic, "peak", clients=12, whole=True) as peak:
        watch.until(lambda seen: seen.nodes == 1 + MOST and seen.running() == MOST, "all replicas, each on a node")
        up = watch.changes[:]
        for running in (steady, peak):
            running.answer_more(6)
        at_the_top = peak.end()
        fallen_at = time.time()
        watch.until(lambda seen: seen.nodes == 2 and seen.total() == seen.running() == 1, "one replica and its node")
        down = watch.changes[len(up) - 1 :]
        steady.answer_more(6)
        at_the_bottom = steady.end()
        assert peak.failures() == steady.failures() == []
    asked = at_the_top + at_the_bottom
    served_by = [{one.replica for one in asked if one.ended > since} for since in (0, at_the_bottom[-1].began)]
    print(f"{len(asked)} requests by {len(served_by[0])} replicas, none failed")
    assert len(served_by[0]) == MOST
    gone = served_by[0] - served_by[1]
    assert len(gone) == MOST - 1
    assert {one.replica for one in at_the_bottom if one.ended > fallen_at} & gone, "what went had streams to finish"
    assert directions([wanted for _, _, _, wanted in up]) == [1]
    assert directions([wanted for _, _, _, wanted in down]) == [-1]
    assert directions([nodes for _, nodes, _, _ in up]) == [1]
    assert directions([nodes for _, nodes, _, _ in down]) == [-1]


def load(cluster: DrillCluster, name: str, clients: int, *, whole: bool = False) -> DrillLoad:
    return DrillLoad(
        [cluster.grpc_address],
        clients=clients,
        tokens=TOKENS,
        folder=cluster.folder,
        name=name,
        env=cluster.env,
        whole=whole,
    )


def directions(counts: Sequence[int]) -> list[int]:
    """Up and down, without repeats: a ramp that never turns has one."""
    steps = [1 if after > before else -1 for before, after in pairwise(counts) if after != before]
    return [step for number, step in enumerate(steps) if number == 0 or steps[number - 1] != step]
