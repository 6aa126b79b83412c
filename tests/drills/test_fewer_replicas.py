"""Replicas go, on a real cluster: all of them and back, the coldest of three, with streams open, by a new deployment.

One Ray cluster with our policy in Serve's controller; every test deploys over it what it needs. Long: `make test-long`.
The log of a run is docs/drills/fewer.md.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
from drill_cluster import DrillCluster
from drill_load import ask
from grpc_health.v1 import health_pb2, health_pb2_grpc
from patience import eventually

from cluster.coldest_victim import INSTALL_PATH
from cluster.config import ClusterConfig
from cluster.index.keys import IndexKeys

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.redis,
    pytest.mark.timeout(900),
    pytest.mark.skipif("KVRAY_LONG" not in os.environ, reason="long: make test-long"),
]

MOST = 3
WAIT_S = 240.0
KEYS = IndexKeys(prefix="kvray", model="tiny")
AT_ZERO = "no replica is ready: a request starts one and waits for it"
CONTROLLER = {"RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": INSTALL_PATH}


def version(model: Path, *, replicas: int = 1, drain_s: float = 30, **scaling: Any) -> ClusterConfig:
    short = {"look_back_s": 5, "up_delay_s": 1, "down_delay_s": 5, "to_zero_delay_s": 3, "start_s": 5}
    return ClusterConfig.model_validate(
        {
            "engine": {"model": str(model), "threads": 1, "max_num_seqs": 5, "cache": {"kv_memory": "16MiB"}},
            "autoscaling": {"max_replicas": MOST, "coldest_victim": True, **short, **scaling},
            "serve": {"replicas": replicas, "drain_s": drain_s, "cpus_per_replica": 0.5},
            "served_model_name": "tiny",
        }
    )


@pytest.fixture(scope="module")
def cluster(tiny_llama_dir: Path) -> Iterator[DrillCluster]:
    with DrillCluster(version(tiny_llama_dir, min_replicas=0), environment=CONTROLLER) as started:
        yield started


def test_to_zero_and_back(cluster: DrillCluster, tiny_llama_dir: Path) -> None:
    deploy(cluster, version(tiny_llama_dir, min_replicas=0))
    for kind, first in (("gRPC", by_grpc), ("HTTP", by_http)):
        until_none(cluster)
        said, healthy = ready(cluster), health(cluster)
        print(f"at zero: /ready says {said}, gRPC health {healthy}")
        assert said == (200, {"status": "ready", "reason": AT_ZERO, "index": "following", "replicas": {}})
        assert healthy == "SERVING"
        began = time.monotonic()
        assert by_http(cluster, 0, timeout_s=1.0) == "504 deadline_exceeded", "a client's own deadline ends its wait"
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(partial(first, cluster), range(4)))
        print(f"from zero by {kind}: 4 answers after {time.monotonic() - began:.1f} s")
        assert answers == [None] * 4


def by_grpc(cluster: DrillCluster, number: int) -> str | None:
    """What went wrong."""
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        asked = ask(cluster.grpc_address, channel, number, 96, 8)
    return asked.error if len(asked.tokens) == 8 or asked.error else "short"


def by_http(cluster: DrillCluster, number: int, **more: Any) -> str | None:
    body = {"model": "tiny", "prompt": f"the sea {number}", "max_tokens": 8, "ignore_eos": True, **more}
    request = urllib.request.Request(
        f"{cluster.http_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            used = json.load(reply)["usage"]["completion_tokens"]
    except urllib.error.HTTPError as error:
        return f"{error.code} {json.load(error)['error']['code']}"
    return None if used == 8 else f"{used} tokens"


def ready(cluster: DrillCluster) -> tuple[int, dict[str, Any]]:
    with urllib.request.urlopen(f"{cluster.http_url}/ready", timeout=20) as reply:
        return reply.status, json.load(reply)


def health(cluster: DrillCluster) -> str:
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def until_none(cluster: DrillCluster) -> None:
    eventually(lambda: cluster.operator.look().total() == 0, "no replica is left", WAIT_S)
    eventually(lambda: not registered(cluster), "none is left in the index", 30)


def registered(cluster: DrillCluster) -> set[str]:
    """Workers that Redis knows."""
    client: Any  # its annotations allow for answers of every kind
    with redis.Redis.from_url(cluster.redis_url, socket_timeout=5) as client:
        return {member.decode() for member in client.smembers(KEYS.workers)}


def deploy(cluster: DrillCluster, config: ClusterConfig) -> None:
    """Over what runs, with its ports and its Redis."""
    now = cluster.config
    serve = config.serve.model_copy(update={"port": now.serve.port, "grpc_port": now.serve.grpc_port})
    cluster.operator.deploy(config.model_copy(update={"index": now.index, "serve": serve}))
