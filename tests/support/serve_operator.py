"""ServeOperator: starts Serve on a running Ray cluster, deploys, and looks, from a driver process of its own.

The driver is a child, so that the test process never joins a cluster, and so that it can live on another host.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from process_keeper import Kept

from cluster.config import ClusterConfig

_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Seen:
    """The cluster at one moment. nodes: that are alive.  replicas: deployment -> state -> how many."""

    nodes: int
    replicas: dict[str, dict[str, int]]

    def running(self, deployment: str = "LLMWorker") -> int:
        return self.replicas.get(deployment, {}).get("RUNNING", 0)

    def total(self, deployment: str = "LLMWorker") -> int:
        return sum(self.replicas.get(deployment, {}).values())


class ServeOperator:
    """`gcs`: host:port of the cluster; `node_ip`: the node that the driver belongs to. `env` is its whole environment.

    `everywhere`: a front door on each node that has replicas, else on the head only.
    """

    def __init__(
        self,
        gcs: str,
        node_ip: str,
        config: ClusterConfig,
        *,
        folder: Path,
        env: Mapping[str, str],
        inside: Sequence[str] = (),
        everywhere: bool = False,
    ) -> None:
        self.config = config
        self._path = folder / "operator.sock"  # a name in the file system, so it leads into other network namespaces
        self._path.unlink(missing_ok=True)
        location = "EveryNode" if everywhere else "HeadOnly"
        self._kept = Kept(
            [sys.executable, __file__, gcs, node_ip, str(self._path), location, config.model_dump_json()],
            log=folder / "operator.log",
            env=env,
            inside=inside,
        )
        self._wait_until_it_listens()

    def deploy(self, config: ClusterConfig) -> None:
        """A first time, or over what runs. Returns when it runs."""
        self.config = config
        self._order("deploy", config.model_dump_json(), timeout_s=300)

    def look(self) -> Seen:
        reply = self._order("look", "", timeout_s=60)
        return Seen(nodes=reply["nodes"], replicas=reply["replicas"])

    def close(self) -> None:
        self._kept.kill()

    def __enter__(self) -> ServeOperator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _order(self, verb: str, argument: str, timeout_s: float) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(timeout_s)
            line.connect(str(self._path))
            with line.makefile("rw") as file:
                file.write(json.dumps([verb, argument]) + "\n")
                file.flush()
                answer = file.readline()
        reply: dict[str, Any] = json.loads(answer) if answer else {"error": self._kept.said()[-4000:]}
        assert "error" not in reply, reply["error"]
        return reply

    def _wait_until_it_listens(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._path.exists():
            late = time.monotonic() > deadline
            if late or not self._kept.processes():
                said = self._kept.said()[-4000:]
                self.close()
                raise AssertionError(f"the driver did not come up:\n{said}")
            time.sleep(0.1)


class _Driver:
    """What runs in the child."""

    def __init__(self, gcs: str, node_ip: str, location: str, config: ClusterConfig) -> None:
        import ray
        from ray import serve

        from cluster.app import GRPC_SERVICERS

        ray.init(address=gcs, _node_ip_address=node_ip, log_to_driver=False, logging_level="ERROR")
        serve.start(
            proxy_location=location,
            http_options={"host": config.serve.host, "port": config.serve.port},
            grpc_options={
                "port": config.serve.grpc_port,
                "grpc_servicer_functions": list(GRPC_SERVICERS),
                "request_timeout_s": None,
            },
        )
        self._name = config.serve.name

    def deploy(self, config: str) -> dict[str, Any]:
        from ray import serve

        from cluster.app import build_app

        serve.run(build_app(ClusterConfig.model_validate_json(config)), name=self._name, route_prefix="/")
        return {}

    def look(self, _: str) -> dict[str, Any]:
        import ray
        from ray import serve

        app = serve.status().applications.get(self._name)
        deployments = {} if app is None else app.deployments
        states = {
            name: {str(getattr(state, "value", state)): number for state, number in status.replica_states.items()}
            for name, status in deployments.items()
        }
        return {"nodes": sum(node["Alive"] for node in ray.nodes()), "replicas": states}


def main() -> None:
    gcs, node_ip, path, location, config = sys.argv[1:]
    driver = _Driver(gcs, node_ip, location, ClusterConfig.model_validate_json(config))
    with socket.socket(socket.AF_UNIX) as listener:
        ready = f"{path}.new"  # it appears under its name when somebody listens
        listener.bind(ready)
        listener.listen()
        Path(ready).rename(path)
        while True:
            line, _ = listener.accept()
            with line, line.makefile("rw") as file:
                verb, argument = json.loads(file.readline())
                try:
                    reply = getattr(driver, verb)(argument)
                except Exception as error:
                    reply = {"error": f"{verb}: {type(error).__name__}: {error}"}
                file.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
