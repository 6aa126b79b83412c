"""Run by test_node_drain.py in a process of its own: a cluster of two nodes, of which one is drained under a stream."""

from __future__ import annotations

import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ray
from ray import serve
from ray.cluster_utils import Cluster

from cluster.free_ports import free_ports

STREAM_ITEMS = 100


class Streaming:
    def __call__(self, items: int) -> Iterator[str]:
        for _ in range(items):
            time.sleep(0.5)  # a slow answer, not a synchronisation
            yield ray.get_runtime_context().get_node_id()


def application() -> serve.Application:
    options = {"num_cpus": 1}
    deployment = serve.deployment(
        Streaming, ray_actor_options=options, graceful_shutdown_timeout_s=120, graceful_shutdown_wait_loop_s=0.5
    )
    return deployment.bind()


def node() -> dict[str, int]:
    """Ray waits for agents to say which ports they found, too long for a busy machine; so these are given."""
    names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    return {"object_store_memory": 80 * 2**20, **dict(zip(names, free_ports(len(names)), strict=True))}


def main() -> None:
    head = {"num_cpus": 0, "node_ip_address": "127.0.0.2", "include_dashboard": False, **node()}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        old = cluster.add_node(num_cpus=1, **node())
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(proxy_location="Disabled")
        handle = serve.run(application(), route_prefix=None).options(stream=True)
        assert list(handle.remote(1)) == [old.node_id]
        cluster.add_node(num_cpus=1, **node())
        stream: list[str] = []
        reader = threading.Thread(target=lambda: stream.extend(handle.remote(STREAM_ITEMS)))
        reader.start()
        drain(cluster.address, old.node_id)
        wait_for(lambda: list(handle.remote(1)) != [old.node_id])
        assert reader.is_alive(), "the stream was over before its replica had gone: it proves nothing"
        reader.join()
        assert stream == [old.node_id] * STREAM_ITEMS
        wait_for(lambda: not any(node["Alive"] for node in ray.nodes() if node["NodeID"] == old.node_id))
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
    print("the stream ended whole, new requests went elsewhere, the node left")


def drain(address: str, node_id: str) -> None:
    """As preStop does; there, without --node-id, it is the pod's own."""
    program = Path(sysconfig.get_path("scripts")) / "ray"
    command = [str(program) if program.exists() else "ray", "drain-node", "--address", address, "--node-id", node_id]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
    subprocess.run([*command, "--deadline-remaining-seconds", "200"], check=True, timeout=90)


def wait_for(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.2)


if __name__ == "__main__":
    main()
