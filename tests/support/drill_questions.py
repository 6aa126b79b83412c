"""What a drill asks a cluster: requests of its own, what the front door says, what Serve and Redis know of workers.

The model is served as `tiny`, under the index's usual prefix.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

import grpc
import redis
from drill_cluster import DrillCluster
from drill_load import Asked, ask
from grpc_health.v1 import health_pb2, health_pb2_grpc
from patience import eventually

from cluster.index.keys import IndexKeys
from cluster.rpc import inference_pb2 as pb
from cluster.rpc import inference_pb2_grpc as rpc

WAIT_S = 240.0
KEYS = IndexKeys(prefix="kvray", model="tiny")


def by_grpc(cluster: DrillCluster, number: int, tokens: int = 8) -> Asked:
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        return ask(cluster.grpc_address, channel, number, 96, tokens)


def by_http(cluster: DrillCluster, number: int, tokens: int = 8, **more: Any) -> str | None:
    """What went wrong: the status and code of an error, or how many tokens came."""
    body = {"model": "tiny", "prompt": f"the sea {number}", "max_tokens": tokens, "ignore_eos": True, **more}
    request = urllib.request.Request(
        f"{cluster.http_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            used = json.load(reply)["usage"]["completion_tokens"]
    except urllib.error.HTTPError as error:
        return f"{error.code} {json.load(error)['error']['code']}"
    return None if used == tokens else f"{used} tokens"


def by_prefix(cluster: DrillCluster, number: int, prompt_tokens: int) -> Asked:
    """A long prompt that has nothing in common with those of other numbers, and a short answer."""
    ids = [4 + (number * 37 + place * (number + 3)) % 92 for place in range(prompt_tokens)]
    sampling = pb.SamplingOptions(temperature=0, max_tokens=2, ignore_eos=True)
    call = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling)
    began = time.time()
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        reply = rpc.InferenceStub(channel).GenerateOnce(call, timeout=WAIT_S)
    cached, tokens = reply.usage.cached_tokens, tuple(reply.token_ids)
    return Asked(number, cluster.grpc_address, began, None, time.time(), tokens, cached, reply.replica, "", None)


def front_door(cluster: DrillCluster) -> str:
    """The one that answers."""
    return by_grpc(cluster, 0, tokens=1).router


def ready(cluster: DrillCluster) -> tuple[int, dict[str, Any]]:
    with urllib.request.urlopen(f"{cluster.http_url}/ready", timeout=20) as reply:
        return reply.status, json.load(reply)


def health(cluster: DrillCluster) -> str:
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def rows(cluster: DrillCluster) -> list[pb.ReplicaStatus]:
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        return list(rpc.CacheStub(channel).Status(pb.StatusRequest(), timeout=20).replicas)


def settled(cluster: DrillCluster, replicas: int) -> set[str]:
    """The ids of the workers, once there are so many, and one front door, and nothing starts or stops."""

    def is_settled() -> bool:
        seen = cluster.operator.look()
        return seen.running() == seen.total() == len(registered(cluster)) == replicas and seen.total("Ingress") == 1

    eventually(is_settled, f"{replicas} workers", WAIT_S)
    return registered(cluster)


def registered(cluster: DrillCluster) -> set[str]:
    """Workers that Redis knows."""
    client: Any  # its annotations allow for answers of every kind
    with redis.Redis.from_url(cluster.redis_url, socket_timeout=5) as client:
        return {member.decode() for member in client.smembers(KEYS.workers)}


def left_of(cluster: DrillCluster, worker_id: str) -> list[str]:
    """Keys of the index that are about this worker: its life with its epoch, its chunks, its heartbeat."""
    client: Any
    with redis.Redis.from_url(cluster.redis_url, socket_timeout=5) as client:
        return [key.decode() for key in client.scan_iter(f"*{worker_id}*")]
