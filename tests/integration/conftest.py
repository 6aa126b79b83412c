"""A real cluster for the tests of this folder: `kvray serve` as a child process, two replicas of the demo model, fp32.

Ports are free ones; everything started is in one process group and ends
with the session.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import yaml

from cluster.free_ports import free_ports
from cluster.rpc import inference_pb2 as pb
from cluster.rpc import inference_pb2_grpc as rpc

SERVE_CONFIG = Path(__file__).parents[2] / "cluster" / "serve_config.yaml"
START_TIMEOUT_S = 240
STOP_TIMEOUT_S = 45


@dataclass
class RunningCluster:
    """What a client of the cluster needs, and the process behind it."""

    process: subprocess.Popen[bytes]
    http_url: str
    grpc_address: str
    log: Path

    def stub(self) -> rpc.InferenceStub:
        return rpc.InferenceStub(self.channel())

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.grpc_address)

    def status(self) -> pb.StatusResponse:
        with self.channel() as channel:
            return rpc.CacheStub(channel).Status(pb.StatusRequest(), timeout=20)

    def settled(self, replicas: int = 2, timeout_s: float = 90) -> pb.StatusResponse:
        """The status once `replicas` are registered, idle, and their heartbeats say so."""
        deadline = time.monotonic() + timeout_s
        while True:
            reply = self.status()
            idle = all(r.running == r.waiting == r.in_use_blocks == 0 for r in reply.replicas)
            if len(reply.replicas) == replicas and idle:
                return reply
            assert time.monotonic() < deadline, f"the cluster did not settle: {reply}"
            time.sleep(0.3)


def wait_http(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"kvray serve ended early:\n{log.read_text()[-4000:]}"
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise AssertionError(f"not ready after {START_TIMEOUT_S} s:\n{log.read_text()[-4000:]}")


def start_cluster(folder: Path, *options: str) -> RunningCluster:
    http_port, grpc_port = free_ports(2)
    ports = ("--port", str(http_port), "--grpc-port", str(grpc_port))
    log = folder / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", "serve", *ports, *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "RAY_DEDUP_LOGS": "0"},
        )
    cluster = RunningCluster(process, f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", log)
    try:
        wait_http(cluster.http_url, process, log)
    except BaseException:
        stop_cluster(cluster)
        raise
    return cluster


def stop_cluster(cluster: RunningCluster) -> None:
    """Ctrl-C, as a terminal sends it: to the whole process group."""
    if cluster.process.poll() is None:
        os.killpg(cluster.process.pid, signal.SIGINT)
        cluster.process.wait(STOP_TIMEOUT_S)


@pytest.fixture(scope="session")
def cluster(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Started from a config file, as `kvray serve --config`."""
    folder = tmp_path_factory.mktemp("cluster")
    engine = {"model": str(demo_model_dir), "dtype": "float32", "max_model_len": 4096, "threads": 1}
    args = {"served_model_name": "demo", "engine": {**engine, "cache": {"kv_memory": "512MiB"}}}
    document = yaml.safe_load(SERVE_CONFIG.read_text())
    document["applications"][0]["args"] = args
    (folder / "serve.yaml").write_text(yaml.safe_dump(document))
    running = start_cluster(folder, "--config", str(folder / "serve.yaml"))
    yield running
    stop_cluster(running)


@pytest.fixture(scope="module")
def two_models(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Two applications in one config file, each with one replica: `one` at /, `two` at /two."""
    folder = tmp_path_factory.mktemp("two_models")
    document = yaml.safe_load(SERVE_CONFIG.read_text())
    (application,) = document["applications"]
    engine = {"model": str(tiny_llama_dir), "max_model_len": 256, "cache": {"kv_memory": "8MiB"}}
    document["applications"] = [
        {
            **application,
            "name": name,
            "route_prefix": route,
            "args": {"served_model_name": f"tiny-{name}", "engine": engine, "serve": {"replicas": 1}},
        }
        for name, route in (("one", "/"), ("two", "/two"))
    ]
    (folder / "serve.yaml").write_text(yaml.safe_dump(document))
    running = start_cluster(folder, "--config", str(folder / "serve.yaml"))
    yield running
    stop_cluster(running)


@pytest.fixture
def fine_cluster(demo_model_dir: Path, tmp_path: Path) -> Iterator[RunningCluster]:
    """Two replicas for one test that know and reuse prompts in whole blocks of 16 tokens."""
    running = start_cluster(
        tmp_path,
        *("--model", str(demo_model_dir), "--dtype", "float32", "--threads", "1", "--kv-memory", "512MiB"),
        *("--max-model-len", "4096", "--block-size", "16", "--chunk-tokens", "16", "--no-partial-reuse"),
    )
    yield running
    stop_cluster(running)
