"""build_app: the Serve application, front door plus workers. The only module that imports both router and worker.

Owns: deployment options: names, replicas, resources, limits, health checks, the router class; the version of each.
Does not: start Ray or Serve (cluster.launcher) or read the environment.
Invariants: `max_ongoing_requests` is far above the engine's own queue, so only the engine refuses.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from cluster.autoscaling import serve_options
from cluster.config import ClusterConfig
from cluster.pinned_version import pinned, version_of
from cluster.replica_args import told_to_front_doors, told_to_workers
from router.ingress import Ingress, build_ingress_app
from worker.deployment import LLMWorker

GRPC_SERVICERS = (
    "cluster.rpc.inference_pb2_grpc.add_InferenceServicer_to_server",
    "cluster.rpc.inference_pb2_grpc.add_CacheServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
)
ROUTER_CLASS = "router.prefix_router.PrefixAwareRouter"
HEALTH_PERIOD_S = 1.0
HEALTH_TIMEOUT_S = 10.0


def build_app(config: ClusterConfig) -> Application:
    """`config.index.redis_url` must be set."""
    for_workers, for_front_doors = told_to_workers(config).model_dump(), told_to_front_doors(config).model_dump()
    state_name = f"{config.serve.name}/LLMWorker"
    engine, placement = config.engine, config.serve
    replicas: dict[str, Any] = {"num_replicas": placement.replicas}
    if config.autoscaling is not None:
        replicas = {"autoscaling_config": serve_options(config.autoscaling, placement.replicas)}
    worker = serve.deployment(
        LLMWorker,
        name="LLMWorker",
        max_ongoing_requests=4 * (engine.max_queue + engine.max_num_seqs),
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=placement.stop_limit_s,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": placement.cpus_per_replica, "num_gpus": placement.gpus_per_replica},
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER_CLASS, request_router_kwargs={"state_name": state_name}
        ),
        **replicas,
    )
    front_door = serve.deployment(
        serve.ingress(build_ingress_app)(Ingress),
        name="Ingress",
        num_replicas=config.router.replicas,
        # Serve would stop an old one first: where there is one front door only, an update would close it.
        max_surge_percent=100,
        max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=placement.stop_limit_s,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": 0.1},
    )
    workers = pinned(worker, version_of(for_workers)).bind(for_workers)
    version = version_of({"config": for_front_doors, "state_name": state_name})
    return pinned(front_door, version).bind(workers, for_front_doors, state_name)
