"""Two front doors: the requests of one connection are shared out among them, and an update closes none.

The update is Serve's rolling one, under load, to another model and chunk size: two versions stand side by side, and
every answer is one of theirs, whole. Another process listens where their own gRPC ports would be, as a second cluster
on this machine does, and gets nothing. Named after its cluster, which all tests need.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
import tiny_models
from drill_cluster import DrillCluster
from drill_load import Asked, DrillLoad, ask, prompt_ids
from drill_questions import KEYS
from drill_questions import rows as status_rows
from patience import eventually
from port_stranger import PortStranger

from cluster.config import ClusterConfig, EngineConfig
from cluster.core.replica import WorkerId
from cluster.core.sampling import SamplingParams
from cluster.offline import OfflineEngine

pytestmark = [pytest.mark.cluster, pytest.mark.redis, pytest.mark.timeout(240)]

REQUESTS = 200
WORKERS = (
    3  # replaced one by one: for a while there is one of the new version, and one of the old one that is not leaving
)
PROMPTS, PROMPT_TOKENS, TOKENS = 6, 192, 128


def version(model: Path, chunk_tokens: int) -> ClusterConfig:
    cache = {"kv_memory": "16MiB", "chunk_tokens": chunk_tokens}
    return ClusterConfig.model_validate(
        {
            "engine": {"model": str(model), "threads": 1, "cache": cache},
            "router": {"replicas": 2},
            "serve": {"replicas": WORKERS, "drain_s": 8, "cpus_per_replica": 0.5},
            "served_model_name": "tiny",
        }
    )


@pytest.fixture(scope="module")
def old_model(tiny_llama_dir: Path) -> Path:
    return tiny_llama_dir


@pytest.fixture(scope="module")
def new_model(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Path(shutil.copytree(tiny_model_dir("qwen3"), tmp_path_factory.mktemp("next") / "qwen3"))
    tiny_models.save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def stranger() -> Iterator[PortStranger]:
    with PortStranger(2) as stranger:
        yield stranger


@pytest.fixture(scope="module")
def two_doors(old_model: Path, stranger: PortStranger) -> Iterator[DrillCluster]:
    ports = {
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(stranger.ports.start),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(stranger.ports.stop + 20),
    }
    with DrillCluster(version(old_model, 64), environment=ports) as cluster:
        yield cluster


def test_a_port_of_another_process_is_left_to_it(two_doors: DrillCluster, stranger: PortStranger) -> None:
    assert stranger.connections() == 0, "HAProxy takes it for a front door"
    with grpc.insecure_channel(two_doors.grpc_address) as channel:
        assert ask(two_doors.grpc_address, channel, 0, 96, 2).error is None
    assert stranger.connections() == 0


@pytest.mark.parametrize("at_once", [1, 8])
def test_requests_of_one_channel_are_shared_out(two_doors: DrillCluster, at_once: int) -> None:
    address = two_doors.grpc_address
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(at_once) as pool:
        asked = list(pool.map(lambda number: ask(address, channel, number % 8, 96, 2), range(REQUESTS)))
    assert [one.error for one in asked] == [None] * REQUESTS
    shares = Counter(one.router for one in asked)
    print(f"{REQUESTS} requests, {at_once} at once: {sorted(shares.values())} by front door")
    assert len(shares) == 2
    assert min(shares.values()) >= 0.35 * REQUESTS, shares


@pytest.mark.skipif("KVRAY_LONG" not in os.environ, reason="long: make test-long")
def test_an_update_under_load(two_doors: DrillCluster, old_model: Path, new_model: Path) -> None:
    answers = {"old": answers_of(old_model), "new": answers_of(new_model)}
    assert not set(answers["old"].values()) & set(answers["new"].values())
    before = registered(two_doors)
    load = DrillLoad(
        [two_doors.grpc_address],
        clients=4,
        tokens=TOKENS,
        prompts=PROMPTS,
        prompt_tokens=PROMPT_TOKENS,
        folder=two_doors.folder,
        name="update",
        pause_s=0.1,
        env=two_doors.env,
    )
    with load:
        load.answer_more(4 * PROMPTS)
        two_doors.operator.deploy(two_doors.config.model_copy(update={"engine": version(new_model, 32).engine}))
        eventually(lambda: is_settled(two_doors), "the old version is gone", 60)
        settled = time.time()
        load.answer_more(4 * PROMPTS)
        asked = load.end()
    assert load.failures() == []
    by_version = {name: [one for one in asked if one.tokens == known[one.prompt]] for name, known in answers.items()}
    strange = [one for one in asked if one.tokens not in {known[one.prompt] for known in answers.values()}]
    assert strange == [], f"of no version; replicas here: {before | registered(two_doors)}; asked for: {answers}"
    old, new = replicas(by_version["old"]), replicas(by_version["new"])
    after = all_registered(two_doors, without=before)
    assert old and new and old <= before and new <= after
    assert all(one.replica in new for one in asked if one.began > settled)
    together_s = max(one.ended for one in by_version["old"]) - min(one.began for one in by_version["new"])
    print(f"both versions answered for {together_s:.1f} s")  # how long is the machine's to say
    for many in by_version.values():
        assert max(one.cached_tokens for one in many) >= PROMPT_TOKENS // 2, "each version reuses its own"
    rows = {row.worker_id: row for row in status_rows(two_doors)}
    assert {(worker_id, row.chunk_tokens) for worker_id, row in rows.items()} == {(worker, 32) for worker in after}
    assert all(rows[worker_id].indexed_chunks > 0 for worker_id in new)
    assert len({one.router for one in asked}) == 4, "two front doors of each version"


def answers_of(model: Path) -> dict[int, tuple[int, ...]]:
    """What that version says to each prompt, computed without any cache."""
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    config = EngineConfig.model_validate(
        {"model": str(model), "threads": 1, "cache": {"kv_memory": "16MiB", "prefix_cache": "off"}}
    )
    with OfflineEngine(config, model) as engine:
        return {
            number: tuple(
                token
                for piece in engine.generate(prompt_ids(number, PROMPT_TOKENS), sampling)
                for token in piece.token_ids
            )
            for number in range(PROMPTS)
        }


def replicas(asked: Sequence[Asked]) -> set[str]:
    return {one.replica for one in asked}


def is_settled(cluster: DrillCluster) -> bool:
    seen = cluster.operator.look()
    return all(seen.running(name) == seen.total(name) == n for name, n in (("LLMWorker", WORKERS), ("Ingress", 2)))


def registered(cluster: DrillCluster) -> set[str]:
    """Workers that Redis knows, each of which holds chunks: what is gone has left nothing behind."""
    client: Any  # its annotations allow for answers of every kind
    with redis.Redis.from_url(cluster.redis_url, socket_timeout=5) as client:
        known = {member.decode() for member in client.smembers(KEYS.workers)}
        prefix = KEYS.chunks(WorkerId(""))
        assert {key.decode().removeprefix(prefix) for key in client.scan_iter(f"{prefix}*")} <= known
    return known


def all_registered(cluster: DrillCluster, without: set[str]) -> set[str]:
    """The new version's workers, once those of the old one have left the index."""
    eventually(lambda: not registered(cluster) & without, "the old version has left the index", 20)
    found = registered(cluster)
    assert len(found) == WORKERS
    return found
