"""coldest_victim: when replicas have to go, those whose caches were of least use lately. A switch, off by default.

Ray Serve stops replicas that do not run yet, then those on the node with the fewest, then the newest there; where every
replica has a node of its own that is the oldest one, whose cache is often the warmest. No option changes it. `install`
runs in Serve's controller (RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH) and replaces the order among running replicas:

    replicas that do not run      first, as in Serve
    not on the head's node        first, as in Serve
    least `heat`                  that is what record_routing_stats of worker.deployment says

The risk: it replaces two private methods of Serve. On any other version than the one it was written for, or where they
look different, it changes nothing and says so in one line; a controller that cannot install it starts all the same.

Owns: that order, and the check of what it replaces.
Does not: decide how many go (cluster.autoscaling), or measure heat (worker.cache_heat).
Invariants: as many replicas are chosen as Serve asked for; deployments without heat, and gangs, are left to Serve.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import ray

logger = logging.getLogger("ray.serve")  # no other logger is heard in the controller

INSTALL_PATH = "cluster.coldest_victim.install"
RAY_VERSION = "2.60.0"
_SCALE = ("self", "gang_placement_groups", "proxy_nodes")
_STOP = ("self", "deployment_id", "max_num_to_stop", "gang_id_by_replica", "replicas_by_gang_id", "gang_size")

Heats = dict[Any, dict[Any, float]]  # by deployment and replica


def install() -> None:
    """Called by Serve without arguments."""
    try:
        _install()
    except Exception as error:
        logger.warning("the coldest replica is not preferred: %s", error)


def _install() -> None:
    if ray.__version__ != RAY_VERSION:
        raise RuntimeError(f"written for Ray {RAY_VERSION}, this is {ray.__version__}")
    from ray.serve._private.deployment_scheduler import DeploymentScheduler
    from ray.serve._private.deployment_state import DeploymentReplica, DeploymentState

    scale, stop = DeploymentState.scale_deployment_replicas, DeploymentScheduler._get_replicas_to_stop
    for method, expected in ((scale, _SCALE), (stop, _STOP)):
        if tuple(inspect.signature(method).parameters) != expected:
            raise RuntimeError(f"{method.__qualname__} is not as expected")
    if not isinstance(getattr(DeploymentReplica, "routing_stats", None), property):
        raise RuntimeError("replicas have no routing_stats")
    heats: Heats = {}
    DeploymentState.scale_deployment_replicas = _noting(scale, heats)
    DeploymentScheduler._get_replicas_to_stop = _coldest_first(stop, heats)
    logger.info("replicas with the coldest caches go first")


def _noting(scale: Callable[..., Any], heats: Heats) -> Callable[..., Any]:
    def scale_deployment_replicas(self: Any, *args: Any, **options: Any) -> Any:
        found = {}
        for replica in self._replicas.get():
            heat = (replica.routing_stats or {}).get("heat")
            if isinstance(heat, int | float) and not isinstance(heat, bool):
                found[replica.replica_id] = float(heat)
        heats[self._id] = found
        return scale(self, *args, **options)

    return scale_deployment_replicas


def _coldest_first(stop: Callable[..., Any], heats: Heats) -> Callable[..., Any]:
    def get_replicas_to_stop(
        self: Any,
        deployment_id: Any,
        max_num_to_stop: int,
        gang_id_by_replica: Any = None,
        replicas_by_gang_id: Any = None,
        gang_size: Any = None,
    ) -> Any:
        heat, running = heats.get(deployment_id), self._running_replicas[deployment_id]
        if not heat or gang_id_by_replica is not None:
            return stop(self, deployment_id, max_num_to_stop, gang_id_by_replica, replicas_by_gang_id, gang_size)
        order = [
            *self._pending_replicas[deployment_id],
            *self._launching_replicas[deployment_id],
            *self._recovering_replicas[deployment_id],
        ]
        order += sorted(running, key=lambda one: (running[one] == self._head_node_id, heat.get(one, 0.0)))
        chosen = order[:max_num_to_stop]
        told = ", ".join(f"{one.unique_id} {heat.get(one, 0.0):g}" for one in running)
        logger.info("the coldest go: %s; heat of those that run: %s", [one.unique_id for one in chosen], told)
        return set(chosen)

    return get_replicas_to_stop
