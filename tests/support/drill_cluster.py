"""DrillCluster: a Ray head on this machine with Serve on it, optionally with an autoscaler that adds fake nodes.

The nodes are Ray's own fake ones: raylets with pretended resources, added and removed by Ray's real autoscaler (v2).
All processes belong to one keeper, ports and folders are private.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from process_keeper import Kept
from ray_nodes import drill_environment, head_command, start_ray
from serve_operator import ServeOperator

from cluster.config import ClusterConfig
from cluster.free_ports import free_ports
from cluster.index.private_server import PrivateRedis

_ADDRESS = "127.0.0.2"  # Ray would rewrite 127.0.0.1 to an address that others can reach
_HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"


class DrillCluster:
    """`config` is completed with ports and a private Redis. `gpu_nodes`: how many nodes of one GPU there may be.

    `idle_s`: after that long a node without work goes.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        head_cpus: int = 4,
        gpu_nodes: int = 0,
        idle_s: float = 6.0,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._config = config
        self._head_cpus = head_cpus
        self._gpu_nodes = gpu_nodes
        self._idle_s = idle_s
        self._environment = environment or {}
        self._redis = PrivateRedis()
        self._head: Kept | None = None
        self._operator: ServeOperator | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="kvd-"))  # short: Ray keeps sockets in it

    @property
    def config(self) -> ClusterConfig:
        """As deployed last."""
        return self.operator.config

    @property
    def operator(self) -> ServeOperator:
        assert self._operator is not None
        return self._operator

    @property
    def grpc_address(self) -> str:
        return f"{self.config.serve.host}:{self.config.serve.grpc_port}"

    @property
    def http_url(self) -> str:
        return f"http://{self.config.serve.host}:{self.config.serve.port}"

    @property
    def redis_url(self) -> str:
        return self._redis.url

    @property
    def env(self) -> dict[str, str]:
        return self._env

    def start(self) -> DrillCluster:
        """Blocks until the application runs."""
        try:
            self._redis.start()
            gcs_port, client_port, http_port, grpc_port = free_ports(4)
            config = self._completed(http_port, grpc_port)
            self._env = drill_environment(self.folder / "haproxy", config.serve.drain_s, **self._environment)
            self._start_head(gcs_port, client_port)
            gcs = f"{_ADDRESS}:{gcs_port}"
            self._operator = ServeOperator(gcs, _ADDRESS, config, folder=self.folder, env=self._env)
            self._operator.deploy(config)
        except BaseException:
            self.stop()
            raise
        return self

    def redeploy(self, config: ClusterConfig) -> None:
        """Over what runs, with its ports and its Redis."""
        now = self.config
        serve = config.serve.model_copy(update={"port": now.serve.port, "grpc_port": now.serve.grpc_port})
        self.operator.deploy(config.model_copy(update={"index": now.index, "serve": serve}))

    def stop(self) -> None:
        for kept in (self._operator, self._head):
            if kept is not None:
                kept.close() if isinstance(kept, ServeOperator) else kept.kill()
        self._redis.stop()
        if "KVRAY_KEEP_DRILL" not in os.environ:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> DrillCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _completed(self, http_port: int, grpc_port: int) -> ClusterConfig:
        config = self._config
        index = config.index.model_copy(update={"redis_url": self._redis.url})
        serve = config.serve.model_copy(update={"port": http_port, "grpc_port": grpc_port})
        return config.model_copy(update={"index": index, "serve": serve})

    def _start_head(self, gcs_port: int, client_port: int) -> None:
        more = [f"--num-cpus={self._head_cpus}", "--num-gpus=0", f"--ray-client-server-port={client_port}"]
        env = self._env
        if self._gpu_nodes:
            autoscaling = self.folder / "autoscaling.json"
            autoscaling.write_text(json.dumps(self._autoscaling(f"{_ADDRESS}:{gcs_port}")))
            more.append(f"--autoscaling-config={autoscaling}")
            env = env | {
                "RAY_FAKE_CLUSTER": "1",
                "RAY_enable_autoscaler_v2": "1",
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                "RAY_CLOUD_INSTANCE_ID": _HEAD_ID,
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID,
            }
        else:
            more.append("--no-monitor")
        command = head_command(_ADDRESS, gcs_port, str(self.folder / "ray"), *more)
        self._head = start_ray(lambda: Kept(command, log=self.folder / "head.log", env=env))

    def _autoscaling(self, gcs: str) -> dict[str, Any]:
        """An external provider gets no defaults, so every section that the monitor reads is here."""
        gpu = {"CPU": 1, "GPU": 1, "object_store_memory": 100 * 2**20}
        lists = ["cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands"]
        lists += ["head_setup_commands", "head_start_ray_commands"]
        lists += ["worker_setup_commands", "worker_start_ray_commands"]
        return {
            "cluster_name": "drill",
            "max_workers": self._gpu_nodes,
            "upscaling_speed": 100.0,
            "idle_timeout_minutes": self._idle_s / 60,
            "provider": {
                "type": "external",
                "module": _PROVIDER,
                "gcs_address": gcs,
                "launch_multiple": True,
                "head_node_id": _HEAD_ID,
            },
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": self._head_cpus}, "node_config": {}, "max_workers": 0},
                "gpu": {"resources": gpu, "node_config": {}, "min_workers": 0, "max_workers": self._gpu_nodes},
            },
            "head_node_type": "ray.head.default",
            "auth": {},
            "docker": {},
            "file_mounts": {},
            "file_mounts_sync_continuously": False,
            **{name: [] for name in lists},
        }
