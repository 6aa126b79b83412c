"""LocalCluster: everything `kvray serve` starts on one machine, and the end of all of it.

Order up: private Redis (if none is configured), Ray, Serve with its proxy, the applications. Down in reverse.

Owns: the life of these processes and a private scratch folder.
Does not: resolve models or print (cluster.serve_command), or define deployments (cluster.app).
Invariants: `stop` ends everything `start` began, in whatever state it is, and may be called twice; only processes
started here are touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig
from cluster.core.errors import ConfigError
from cluster.core.replica import ReplicaInfo
from cluster.index.private_server import PrivateRedis
from cluster.index.redis_reader import RedisReader
from cluster.ray_environment import apply_environment, put_redis_url, ray_environment, redis_url_from_environment
from cluster.serve_file import ServedModel, ServeFile
from cluster.startup_failure import startup_failure

logger = logging.getLogger(__name__)


class LocalCluster:
    """`file`: deploy its applications; `config` is then that of its first model. `show_logs`: print what the replicas
    log. `ray_temp_dir`: Ray's folder; a short path."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        file: ServeFile | None = None,
        show_logs: bool = True,
        ray_temp_dir: str | None = None,
    ) -> None:
        self.config = config if file is not None else stopped_at_once(config)
        self.file = file
        self._show_logs = show_logs
        self._ray_temp_dir = ray_temp_dir
        self._redis: PrivateRedis | None = None
        self._scratch: Path | None = None
        self._ray_started = False

    @property
    def http_url(self) -> str:
        return f"http://{self.config.serve.host}:{self.config.serve.port}"

    @property
    def grpc_address(self) -> str:
        return f"{self.config.serve.host}:{self.config.serve.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """Where Ray shows what every process of this machine counts, for Prometheus."""
        import ray

        (node,) = ray.nodes()
        return f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"

    @property
    def models(self) -> tuple[ServedModel, ...]:
        if self.file is not None:
            return self.file.models
        return (ServedModel(self.config.serve.name, "/", self.config),)

    def url_of(self, model: ServedModel) -> str:
        return self.http_url + model.route_prefix.rstrip("/")

    def start(self, on_phase: Callable[[str], None] = lambda phase: None, timeout_s: float = 300.0) -> None:
        """Blocks until the front door answers ready. ConfigError says what could not start."""
        self._scratch = Path(tempfile.mkdtemp(prefix="kvray-"))
        self._use_redis(on_phase)
        on_phase("starting Ray")
        drain_s = max(model.config.serve.drain_s for model in self.models)
        scalings = [model.config.autoscaling for model in self.models]
        coldest_victim = any(scaling is not None and scaling.coldest_victim for scaling in scalings)
        apply_environment(ray_environment(self._scratch, drain_s, coldest_victim=coldest_victim))
        self._start_ray()
        on_phase("starting Serve and its proxy")
        self._start_serve()
        on_phase(f"loading {sum(model.config.serve.replicas for model in self.models)} replicas")
        if self.file is None:
            self._run_app()
        else:
            self._deploy(self.file)
        for model in self.models:
            self._wait_ready(self.url_of(model), timeout_s)

    def stop(self) -> None:
        try:
            if self._ray_started:
                self._stop_ray()
        finally:
            if self._redis is not None:
                self._redis.stop()
                self._redis = None
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)
                self._scratch = None

    def _stop_ray(self) -> None:
        import ray
        from ray import serve

        # Serve ends its controller by killing it, and Ray then prints that as a failure on stdout.
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                serve.shutdown()
            finally:
                ray.shutdown()
                self._ray_started = False

    def replicas(self, config: ClusterConfig | None = None) -> list[ReplicaInfo]:
        """What the registered replicas of a model (default: the first) say of themselves."""
        config = config or self.config

        async def read() -> list[ReplicaInfo]:
            assert config.index.redis_url is not None
            reader = RedisReader.open(config.index, config.index.redis_url, config.public_name)
            try:
                return [r.info for r in (await reader.workers()).values()]
            finally:
                await reader.close()

        return asyncio.run(read())

    def _use_redis(self, on_phase: Callable[[str], None]) -> None:
        """The configured one, else that of the environment, else a private one; the same for all models."""
        urls = {model.config.index.redis_url for model in self.models}
        if len(urls) > 1:
            raise ConfigError("kvray serve uses one Redis for all models: give every application the same redis_url")
        url = urls.pop() or redis_url_from_environment()
        if url is None:
            on_phase("starting a private Redis")
            self._redis = PrivateRedis().start()
            url = self._redis.url

        def with_url(config: ClusterConfig) -> ClusterConfig:
            return config.model_copy(update={"index": config.index.model_copy(update={"redis_url": url})})

        self.config = with_url(self.config)
        if self.file is not None:
            self.file = self.file.with_configs([with_url(model.config) for model in self.file.models])
            put_redis_url(url)

    def _start_ray(self) -> None:
        import ray

        options: dict[str, Any] = {"_node_ip_address": "127.0.0.2"} if sys.platform == "linux" else {}
        if self._ray_temp_dir is not None:
            options["_temp_dir"] = self._ray_temp_dir
        ray.init(
            address="local",
            log_to_driver=self._show_logs,
            include_dashboard=False,
            object_store_memory=200 * 2**20,
            logging_level=logging.WARNING,
            **options,
        )
        self._ray_started = True

    def _start_serve(self) -> None:
        from ray import serve

        from cluster.app import GRPC_SERVICERS

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if self.file is not None:
            options = {key: self.file.document.get(key) for key in ("proxy_location", "http_options", "grpc_options")}
            serve.start(**{key: value for key, value in options.items() if value is not None})
            return
        serve.start(
            http_options={"host": self.config.serve.host, "port": self.config.serve.port},
            grpc_options={
                "port": self.config.serve.grpc_port,
                "grpc_servicer_functions": list(GRPC_SERVICERS),
                "request_timeout_s": None,
                "enable_reflection": True,
            },
        )

    def _run_app(self) -> None:
        from ray import serve

        from cluster.app import build_app

        try:
            serve.run(build_app(self.config), name=self.config.serve.name, route_prefix="/")
        except RuntimeError as error:
            deployments = serve.status().applications[self.config.serve.name].deployments
            reason = startup_failure(status.message for status in deployments.values()) or str(error)
            raise ConfigError(f"the application did not start: {reason}") from error

    def _deploy(self, file: ServeFile) -> None:
        """What `serve deploy` does, without the dashboard that it goes through."""
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(file.document))
        while True:
            applications = serve.status().applications
            for name, state in applications.items():
                if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                    told = startup_failure(status.message for status in state.deployments.values())
                    reason = told or (state.message.strip() or "no reason given").splitlines()[-1]
                    raise ConfigError(f"the application {name!r} did not start: {reason}")
            if applications and all(state.status == "RUNNING" for state in applications.values()):
                return
            time.sleep(0.2)

    def _wait_ready(self, url: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{url}/ready", timeout=5) as reply:
                    if reply.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise ConfigError(f"{url} did not become ready in {timeout_s:.0f} s")


def stopped_at_once(config: ClusterConfig) -> ClusterConfig:
    """A local cluster ends with its user, who does not wait for other people's answers unless told to."""
    if "drain_s" in config.serve.model_fields_set:
        return config
    return config.model_copy(update={"serve": config.serve.model_copy(update={"drain_s": 0.0})})
