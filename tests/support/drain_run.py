"""Scales a served model from two replicas to one while both answer, and prints as JSON what happened to whom.

Run as a program, because Ray and Serve leave much behind in a process: `python drain_run.py MODEL_DIR RAY_TEMP_DIR`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from cluster.config import CacheConfig, ClusterConfig, EngineConfig, ServeConfig
from cluster.launcher import LocalCluster
from cluster.ray_environment import free_ports
from cluster.rpc import inference_pb2 as pb
from cluster.rpc import inference_pb2_grpc as rpc

TOKENS = 300
LIMIT_S = 120.0
UNFINISHED = "FINISH_REASON_UNSPECIFIED"


@dataclass
class Stream:
    """One long answer. tokens: how many came.  ended_as: its finish reason, or the code of its error."""

    name: str
    replica: str = ""
    tokens: int = 0
    ended_as: str = ""
    started: threading.Event = field(default_factory=threading.Event)

    def run(self, address: str) -> None:
        sampling = pb.SamplingOptions(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        try:
            with grpc.insecure_channel(address) as channel:
                call = rpc.InferenceStub(channel).Generate(
                    pb.GenerateRequest(text=self.name * 20, sampling=sampling), timeout=LIMIT_S
                )
                for chunk in call:
                    self.replica, self.tokens = chunk.replica, self.tokens + len(chunk.token_ids)
                    self.started.set()
                    self.ended_as = pb.FinishReason.Name(chunk.finish_reason)
        except grpc.RpcError as error:
            self.ended_as = error.code().name
        self.started.set()


def wait_for(what: str, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited in vain for: {what}")
        time.sleep(0.05)
    return found


def words(url: str) -> dict[str, str]:
    """What /ready says of each replica."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=20) as reply:
            return dict(json.load(reply)["replicas"])
    except urllib.error.HTTPError as error:
        return dict(json.load(error).get("replicas", {}))
    except (OSError, ValueError):
        return {}  # a busy machine; asked again


def draining(url: str) -> str | None:
    return next((replica for replica, word in words(url).items() if word == "draining"), None)


def newcomer(address: str) -> str:
    sampling = pb.SamplingOptions(temperature=0, max_tokens=2)
    with grpc.insecure_channel(address) as channel:
        reply = rpc.InferenceStub(channel).GenerateOnce(pb.GenerateRequest(text="hello", sampling=sampling), timeout=60)
    return str(reply.replica)


def build_once() -> list[Any]:
    """From now on `build_app` gives the same application; it is the list's only item once it was built.

    Building it again would be another version of the front door, whose class Serve makes anew.
    """
    import cluster.app

    build, built = cluster.app.build_app, list[Any]()

    def build_app(config: ClusterConfig) -> Any:
        built.append(build(config))
        return built[0]

    cluster.app.build_app = build_app
    return built


def scale_to_one(application: Any, name: str) -> None:
    from ray import serve

    (workers,) = [given for given in application._bound_deployment.init_args if hasattr(given, "_bound_deployment")]
    workers._bound_deployment._deployment_config.num_replicas = 1
    serve.run(application, name=name)


def scenario(cluster: LocalCluster, application: Any) -> dict[str, Any]:
    address, url = cluster.grpc_address, cluster.http_url
    streams = [Stream("the sea "), Stream("a red house ")]
    threads = [threading.Thread(target=stream.run, args=(address,)) for stream in streams]
    for thread in threads:
        thread.start()
    for stream in streams:
        stream.started.wait(LIMIT_S)
    scaling = threading.Thread(target=scale_to_one, args=(application, cluster.config.serve.name))
    scaling.start()
    victim = wait_for("a replica that drains", lambda: draining(url))
    during = [newcomer(address) for _ in range(4)]
    still = [stream.name for stream in streams if stream.replica == victim and stream.ended_as == UNFINISHED]
    for thread in threads:
        thread.join()
    wait_for("its registration to go", lambda: victim not in {info.worker_id for info in cluster.replicas()})
    left = [info.worker_id for info in cluster.replicas()]
    scaling.join()
    rows = [{key: value for key, value in vars(stream).items() if key != "started"} for stream in streams]
    return {"victim": victim, "during": during, "still_running": still, "left": left, "streams": rows}


def main(model_dir: str, ray_temp_dir: str) -> None:
    http_port, grpc_port = free_ports(2)
    cache = CacheConfig(kv_memory=256 * 2**20)
    config = ClusterConfig(
        engine=EngineConfig(model=model_dir, dtype="float32", device="cpu", threads=1, max_model_len=1024, cache=cache),
        serve=ServeConfig(port=http_port, grpc_port=grpc_port, replicas=2, drain_s=90),
    )
    local, built = LocalCluster(config, ray_temp_dir=ray_temp_dir), build_once()
    try:
        local.start()
        found = scenario(local, built[0])
    finally:
        local.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
