"""HTTP/2: the requests of one gRPC channel, which is one connection, are shared out among two front doors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from drill_cluster import DrillCluster
from drill_load import ask

from cluster.config import ClusterConfig

pytestmark = [pytest.mark.cluster, pytest.mark.redis, pytest.mark.timeout(240)]

REQUESTS = 200


@pytest.fixture
def two_doors(tiny_llama_dir: Path) -> Iterator[DrillCluster]:
    config = ClusterConfig.model_validate(
        {
            "engine": {"model": str(tiny_llama_dir), "threads": 1, "cache": {"kv_memory": "16MiB"}},
            "router": {"replicas": 2},
            "serve": {"replicas": 1},
            "served_model_name": "tiny",
        }
    )
    with DrillCluster(config) as cluster:
        yield cluster


@pytest.mark.parametrize("at_once", [1, 8])
def test_one_channel_two_front_doors(two_doors: DrillCluster, at_once: int) -> None:
    address = two_doors.grpc_address
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(at_once) as pool:
        asked = list(pool.map(lambda number: ask(address, channel, number % 8, 96, 2), range(REQUESTS)))
    assert [one.error for one in asked] == [None] * REQUESTS
    shares = Counter(one.router for one in asked)
    assert len(shares) == 2
    assert min(shares.values()) >= 0.35 * REQUESTS, shares
