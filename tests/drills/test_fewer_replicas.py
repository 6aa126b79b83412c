"""Replicas go, on a real cluster: all of them and back, the coldest of three, with streams open; or only some kinds.

One Ray cluster with our policy in Serve's controller; every test deploys over it what it needs. Long: `make test-long`.
The log of a run is docs/drills/fewer.md.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from drill_cluster import DrillCluster
from drill_load import DrillLoad
from drill_questions import (
    WAIT_S,
    by_grpc,
    by_http,
    by_prefix,
    front_door,
    health,
    left_of,
    ready,
    registered,
    settled,
)
from drill_streams import Streams
from patience import eventually

from cluster.coldest_victim import INSTALL_PATH
from cluster.config import ClusterConfig

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.redis,
    pytest.mark.timeout(900),
    pytest.mark.skipif("KVRAY_LONG" not in os.environ, reason="long: make test-long"),
]

HOT_TOKENS = 400
HEAT_IS_TOLD_S = 25.0  # Serve asks for it every 10 s, give or take a tenth
AT_ZERO = "no replica is ready: a request starts one and waits for it"
CONTROLLER = {"RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": INSTALL_PATH}


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose answers may be long enough to be still under way when a test wants them to be."""
    path = Path(shutil.copytree(tiny_llama_dir, tmp_path_factory.mktemp("long") / "llama"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 60_000}))
    return path


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[DrillCluster]:
    with DrillCluster(version(model, least=0, most=3), environment=CONTROLLER) as started:
        yield started


def version(
    model: Path,
    *,
    least: int,
    most: int,
    replicas: int = 1,
    memory: str = "64MiB",
    drain_s: float = 30,
    near_tie: float = 0.05,
    policy: str = "estimated_ttft",
) -> ClusterConfig:
    short = {"look_back_s": 5, "up_delay_s": 1, "down_delay_s": 10, "to_zero_delay_s": 3, "start_s": 5}
    return ClusterConfig.model_validate(
        {
            "engine": {"model": str(model), "threads": 1, "max_num_seqs": 5, "cache": {"kv_memory": memory}},
            "autoscaling": {"min_replicas": least, "max_replicas": most, "coldest_victim": True, **short},
            "router": {"near_tie": near_tie, "policy": policy},
            "serve": {"replicas": replicas, "drain_s": drain_s, "cpus_per_replica": 0.5},
            "served_model_name": "tiny",
        }
    )


def test_to_zero_and_back(cluster: DrillCluster, model: Path) -> None:
    cluster.redeploy(version(model, least=0, most=3))
    for kind, ask in (
        ("gRPC", lambda number: by_grpc(cluster, number).error),
        ("HTTP", lambda number: by_http(cluster, number)),
    ):
        eventually(lambda: cluster.operator.look().total() == 0, "no replica is left", WAIT_S)
        eventually(lambda: not registered(cluster), "none is left in the index", 30)
        said, healthy = ready(cluster), health(cluster)
        print(f"at zero: /ready says {said}, gRPC health {healthy}")
        assert said == (200, {"status": "ready", "reason": AT_ZERO, "index": "following", "replicas": {}})
        assert healthy == "SERVING"
        began = time.monotonic()
        assert by_http(cluster, 0, timeout_s=1.0) == "504 deadline_exceeded", "a client's own deadline ends its wait"
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, range(4)))
        print(f"from zero by {kind}: 4 answers after {time.monotonic() - began:.1f} s")
        assert answers == [None] * 4


def test_the_coldest_goes(cluster: DrillCluster, model: Path) -> None:
    """The newest is made hot: it is the one that Serve itself would stop, where all are on one node."""
    cluster.redeploy(version(model, least=2, most=2, replicas=2))
    older = settled(cluster, 2)
    cluster.redeploy(version(model, least=3, most=3, replicas=3))
    (newest,) = settled(cluster, 3) - older
    hits, hot = heat(cluster, newest)
    cluster.redeploy(version(model, least=2, most=3, replicas=3))  # the autoscaler finds that two are enough
    (gone,) = (older | {newest}) - settled(cluster, 2)
    print(f"tokens found in caches: {sorted(hits.values())}; in the newest {hits[newest]}; in what went {hits[gone]}")
    assert gone not in hot.values() and hits[gone] * 10 < min(hits[one] for one in hot.values())
    again = {number: by_prefix(cluster, number, HOT_TOKENS) for number in hot}
    print("hot prefixes afterwards:", [f"{one.cached_tokens} of {HOT_TOKENS}" for one in again.values()])
    assert all(one.cached_tokens >= 0.9 * HOT_TOKENS for one in again.values())


def test_streams_on_what_goes_end_whole_and_nothing_of_it_stays(cluster: DrillCluster, model: Path) -> None:
    cluster.redeploy(version(model, least=2, most=2, replicas=2, drain_s=90, policy="round_robin"))
    with Streams(cluster, seconds=8) as streams:
        cluster.redeploy(version(model, least=1, most=1, drain_s=90, policy="round_robin"))
        victim, seen_at = streams.until_one_goes()
        newcomers = [by_grpc(cluster, number) for number in range(2)]
        asked = streams.end()
    assert [one.error for one in asked] == [None] * len(asked)
    assert {len(one.tokens) for one in asked} == {streams.tokens}
    eventually(lambda: not left_of(cluster, victim), "what it held has left the index", 60)
    there = [one for one in asked if one.replica == victim]
    print(f"{len(asked)} streams of {streams.tokens} tokens, {len(there)} on the replica that went; all whole")
    assert there and all(one.ended > seen_at for one in there), "they were under way when it drained"
    assert {one.error for one in newcomers} == {None} and victim not in {one.replica for one in newcomers}
    assert len(settled(cluster, 1)) == 1


def test_a_stream_longer_than_the_limit_is_told_so(cluster: DrillCluster, model: Path) -> None:
    cluster.redeploy(version(model, least=2, most=2, replicas=2, drain_s=2, policy="round_robin"))
    with Streams(cluster, seconds=12) as streams:
        cluster.redeploy(version(model, least=1, most=1, drain_s=2, policy="round_robin"))
        victim, _ = streams.until_one_goes()
        eventually(lambda: not left_of(cluster, victim), "what it held has left the index", 60)
        asked = streams.end()
    cut = [one for one in asked if one.replica == victim]
    print("cut off:", [one.error for one in cut])
    assert cut
    for one in cut:
        assert 0 < len(one.tokens) < streams.tokens
        assert one.error == f"UNAVAILABLE: the replica was lost after {len(one.tokens)} tokens; send the request again"
    assert {one.error for one in asked if one.replica != victim} == {None}


def test_a_redeploy_replaces_only_what_it_concerns(cluster: DrillCluster, model: Path) -> None:
    cluster.redeploy(version(model, least=2, most=2, replicas=2))
    workers, door = settled(cluster, 2), front_door(cluster)
    steady = DrillLoad(
        [cluster.grpc_address], clients=2, tokens=50, folder=cluster.folder, name="steady", env=cluster.env, pause_s=0.1
    )
    with steady:
        steady.answer_more(4)
        cluster.redeploy(version(model, least=2, most=4, replicas=3))
        steady.answer_more(20)
        assert (settled(cluster, 2), front_door(cluster)) == (workers, door), (
            "other bounds, and another number at first"
        )
        cluster.redeploy(version(model, least=2, most=4, replicas=3, near_tie=0.2))
        eventually(lambda: front_door(cluster) != door, "the new front door answers", 60)
        steady.answer_more(20)
        assert settled(cluster, 2) == workers, "the router's part: no worker"
        new_door = front_door(cluster)
        cluster.redeploy(version(model, least=2, most=4, replicas=3, near_tie=0.2, memory="65MiB"))
        eventually(lambda: not registered(cluster) & workers, "all workers are new", WAIT_S)
        settled(cluster, 2)
        assert front_door(cluster) == new_door, "an engine's part: no front door"
        asked = steady.end()
    print(f"{len(asked)} requests meanwhile, {len(steady.failures())} failed")
    assert steady.failures() == []


def heat(cluster: DrillCluster, newest: str) -> tuple[Counter[str], dict[int, str]]:
    """Ask for two prefixes, one of them on the newest replica, until the caches differ by far and Serve knows it.

    What was found in which cache, and where each prefix is."""
    hits: Counter[str] = Counter()
    hot: dict[int, str] = {}

    def found_two() -> bool:
        """It is chosen when others are no better; one that looks slow at first is tried again after a while."""
        number = next(numbers)
        one = by_prefix(cluster, number, HOT_TOKENS)
        if one.replica not in hot.values() and (hot or one.replica == newest):
            hot[number] = one.replica
        return len(hot) == 2

    numbers = count()
    eventually(found_two, "a prefix on the newest replica, and one on another", WAIT_S)
    told = time.monotonic() + HEAT_IS_TOLD_S

    def hot_enough() -> bool:
        for number in hot:
            one = by_prefix(cluster, number, HOT_TOKENS)
            hits[one.replica] += one.cached_tokens
        return time.monotonic() > told and all(hits[replica] >= 20 * HOT_TOKENS for replica in hot.values())

    # A prefix that more than a few ask for within two seconds would get a copy elsewhere.
    eventually(hot_enough, "hits on both", WAIT_S, poll_s=1.0)
    return hits, hot
