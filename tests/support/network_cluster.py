"""NetworkCluster: Ray on several hosts of one machine, with a head that can die and come back.

    switch    Redis: the index, and Ray's own state under another prefix; clients
    host 0    the head: GCS, Serve's controller, a front door; no replicas
    others    nodes with replicas, a front door (HAProxy) on each

All that a host runs is killed with it. What is outside the hosts' network cannot be reached from inside, nor they
from outside.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from types import TracebackType

from network_hosts import HostNetwork, NetworkHost
from process_keeper import Kept
from process_tree import command_of
from ray_nodes import drill_environment, head_command, node_command, start_ray
from serve_operator import Seen, ServeOperator

from cluster.config import ClusterConfig
from cluster.index.private_server import find_server

_GCS_PORT, _REDIS_PORT = 6379, 6380
_NO_REPLICAS = ("--num-cpus=0", "--num-gpus=0")
_NODES_WAIT_FOR_THE_HEAD_S = "600"  # as KubeRay has it; Ray's own default is 60 s


class NetworkCluster:
    """`config` is completed with Redis and a listening address; its ports are the same on every host."""

    def __init__(self, config: ClusterConfig, *, nodes: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvn-"))  # short: Ray and HAProxy keep sockets in it
        self._config = config
        self._nodes = nodes
        self._kept: list[Kept] = []
        self._head: Kept | None = None
        self._heads = 0
        self._operator: ServeOperator | None = None

    @property
    def operator(self) -> ServeOperator:
        assert self._operator is not None
        return self._operator

    @property
    def node_doors(self) -> list[str]:
        """gRPC addresses of the front doors that do not depend on the head."""
        return [self._door(host) for host in self.network.hosts[1:]]

    @property
    def head_door(self) -> str:
        return self._door(self.network.hosts[0])

    @property
    def env(self) -> dict[str, str]:
        """For clients."""
        return self._env(self.network.switch)

    def start(self) -> NetworkCluster:
        try:
            self.network = HostNetwork(self.folder, hosts=1 + self._nodes)
            self._redis = self._start_redis()
            index = self._config.index.model_copy(update={"redis_url": self._redis_url})
            serve = self._config.serve.model_copy(update={"host": "0.0.0.0"})
            self._config = self._config.model_copy(update={"index": index, "serve": serve})
            self.start_head()
            for host in self.network.hosts[1:]:
                self._start_node(host)
            self.connect()
            self.wait_for_nodes()
            self.operator.deploy(self._config)
        except BaseException:
            self.stop()
            raise
        return self

    def start_head(self) -> None:
        """The first time, or again after `kill_head`: an empty disk, the same address, the state that Redis holds."""
        host = self.network.hosts[0]
        redis = f"{self.network.switch.address}:{_REDIS_PORT}"
        env = self._env(host) | {"RAY_REDIS_ADDRESS": redis, "RAY_external_storage_namespace": "drill"}
        self._heads += 1
        command = head_command(
            host.address, _GCS_PORT, str(host.folder / f"r{self._heads}"), *_NO_REPLICAS, "--no-monitor"
        )
        self._head = start_ray(lambda: host.keep(command, log="head.log", env=env))

    def kill_head(self) -> list[int]:
        """All processes of the head at once; returns which they were."""
        assert self._head is not None
        processes = self._head.processes()
        self._head.kill()
        return processes

    def kill_a_worker(self) -> int:
        """The process of one worker replica, on whichever node; returns its id."""
        processes = [pid for kept in self._kept for pid in kept.processes()]
        victim = next(pid for pid in processes if command_of(pid).startswith("ray::ServeReplica:kvray:LLMWorker"))
        os.kill(victim, signal.SIGKILL)
        return victim

    def connect(self) -> None:
        """A driver on the first node, in place of one there may have been."""
        if self._operator is not None:
            self._operator.close()
        host = self.network.hosts[1]
        gcs = f"{self.network.hosts[0].address}:{_GCS_PORT}"
        self._operator = ServeOperator(
            gcs,
            host.address,
            self._config,
            folder=self.folder,
            env=self._env(host),
            inside=host.inside,
            everywhere=True,
        )

    def look(self) -> Seen:
        return self.operator.look()

    def wait_for_nodes(self, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while (nodes := self.look().nodes) != 1 + self._nodes:
            assert time.monotonic() < deadline, f"{nodes} nodes"
            time.sleep(0.5)

    def stop(self) -> None:
        if self._operator is not None:
            self._operator.close()
        for kept in [*([self._head] if self._head else []), *self._kept]:
            kept.kill()
        if hasattr(self, "network"):
            self.network.close()
        if "KVRAY_KEEP_DRILL" not in os.environ:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> NetworkCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _redis_url(self) -> str:
        return f"redis://{self.network.switch.address}:{_REDIS_PORT}/0"

    def _door(self, host: NetworkHost) -> str:
        return f"{host.address}:{self._config.serve.grpc_port}"

    def _env(self, host: NetworkHost) -> dict[str, str]:
        more = {"RAY_gcs_rpc_server_reconnect_timeout_s": _NODES_WAIT_FOR_THE_HEAD_S}
        return drill_environment(host.folder / "p", self._config.serve.drain_s, **more)

    def _start_redis(self) -> Kept:
        network = ("--bind", self.network.switch.address, "--port", str(_REDIS_PORT), "--protected-mode", "no")
        command = [str(find_server()), *network, "--save", "", "--dir", str(self.network.switch.folder)]
        kept = self.network.switch.keep(command, log="redis.log", env={})
        self._kept.append(kept)
        return kept

    def _start_node(self, host: NetworkHost) -> None:
        gcs = f"{self.network.hosts[0].address}:{_GCS_PORT}"
        command = node_command(gcs, host.address, str(host.folder / "ray"), "--num-cpus=2", "--num-gpus=0")
        self._kept.append(start_ray(lambda: host.keep(command, log="node.log", env=self._env(host))))
