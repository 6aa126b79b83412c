"""All rules about what must agree between the parts of an installation, and no schema knows.

Here: secrets, time limits, the environment, and what KubeRay refuses. A rule yields what is wrong, one line each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import network_rules
import pod_rules
from manifests import ROOT, Manifests, configs, environment_of, pinned

from cluster.ray_environment import cluster_environment

Rule = Callable[[Manifests], Iterator[str]]

_HARD_STOP = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
_MIN_DRAIN = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
# Serve adds it to the shortest drain of a front door, and raises graceful_shutdown_timeout_s to the sum.
_SERVE_BUFFER_S = 5


def secrets_are_documented(m: Manifests) -> Iterator[str]:
    text = (ROOT / "docs" / "operations.md").read_text()
    for name, key in secret_keys(m.documents):
        command = re.search(rf"create secret generic {re.escape(name)}\b((?:.*\\\n)*.*)", text)
        if command is None:
            yield f"Secret {name}: docs/operations.md does not say how to make it"
        elif key and f"{key}=" not in command[1]:
            yield f"Secret {name}: docs/operations.md gives it no key {key}"
    if {pair for pair in secret_keys(m.documents) if pair[0] == "kvray-redis"} != {("kvray-redis", "password")}:
        yield "Redis, Ray's head and kvray must read the same key of the same Secret"


def secret_keys(node: Any) -> Iterator[tuple[str, str]]:
    """(name, key) wherever a Secret is named; the key is empty where the whole Secret is used."""
    if isinstance(node, list):
        for item in node:
            yield from secret_keys(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key == "secretKeyRef":
                yield value["name"], value["key"]
            elif key == "secretRef":
                yield value["name"], ""
            elif key == "secret" and "secretName" in value:
                yield from ((value["secretName"], item["key"]) for item in value["items"])
            else:
                yield from secret_keys(value)


def times_are_ordered(m: Manifests) -> Iterator[str]:
    """Shortest drain < drain < graceful shutdown < the drain of a whole node < the pod's grace."""
    shortest, hard_stop = float(m.environment[_MIN_DRAIN]), float(m.environment[_HARD_STOP])
    drains = [config.serve.drain_s for config in configs(m)]
    limit = max(config.serve.stop_limit_s for config in configs(m))  # Serve's graceful_shutdown_timeout_s
    if shortest + _SERVE_BUFFER_S >= min(drains):
        yield f"{_MIN_DRAIN} ({shortest:g}) must be below drain_s ({min(drains):g}) by more than {_SERVE_BUFFER_S}"
    for group in m.worker_groups:
        spec = group["template"]["spec"]
        grace, node = spec["terminationGracePeriodSeconds"], node_drain_s(spec["containers"][0])
        if limit >= node:
            yield f"serve.stop_limit_s ({limit:g}) must be below the deadline of the drain in preStop ({node})"
        if node >= grace:
            yield f"the drain in preStop ({node}) must end before terminationGracePeriodSeconds ({grace})"
    if limit >= m.ray_service["spec"]["rayClusterDeletionDelaySeconds"]:
        yield "rayClusterDeletionDelaySeconds ends the old cluster before its streams"
    if hard_stop < max(drains):
        yield f"{_HARD_STOP} ({hard_stop:g}) would cut streams that may drain for {max(drains):g} s"


def node_drain_s(container: dict[str, Any]) -> int:
    """0 when the pod goes without draining its node."""
    command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [""])
    found = re.search(r"ray drain-node .*--deadline-remaining-seconds (\d+)", command[-1].replace("\\\n", " "))
    return int(found[1]) if found else 0


def environment_is_complete(m: Manifests) -> Iterator[str]:
    name = m.config_map("kvray-ray-environment")["metadata"]["name"]
    wanted = cluster_environment(max(config.serve.drain_s for config in configs(m)))
    del wanted["RAY_AUTH_MODE"]  # KubeRay's to set
    shortest = wanted.pop(_MIN_DRAIN)
    for variable, value in wanted.items():
        if m.environment.get(variable) != value:
            yield f"{variable} is {m.environment.get(variable)}, and {value} in cluster/ray_environment.py"
    if float(m.environment[_MIN_DRAIN]) < float(shortest):
        yield f"{_MIN_DRAIN} is below {shortest}"
    takers = {pod.owner: pod.containers[0].get("envFrom", []) for pod in m.ray_pods()}
    takers["autoscaler"] = m.ray_cluster["autoscalerOptions"].get("envFrom", [])
    for owner, sources in takers.items():
        if name not in [source.get("configMapRef", {}).get("name") for source in sources]:
            yield f"{owner}: it does not take the ConfigMap {name}"


def kuberay_accepts(m: Manifests) -> Iterator[str]:
    """What the operator's own validation refuses, and the schema does not."""
    cluster = m.ray_cluster
    if cluster["rayVersion"] != pinned("ray"):
        yield f"rayVersion is not the one in constraints.txt, {pinned('ray')}"
    if cluster.get("authOptions", {}).get("mode") != "token":
        yield "authOptions: without a token everybody who reaches a port may run code"
    kuberays = {"REDIS_PASSWORD", "RAY_REDIS_ADDRESS", "REDIS_USERNAME", "RAY_enable_autoscaler_v2"}
    for name in kuberays & set(environment_of(m.head["template"]["spec"]["containers"][0])):
        yield f"the head may not set {name}: KubeRay does"
    if "redis-password" in m.head["rayStartParams"]:
        yield "rayStartParams may not hold redis-password"
    if not cluster.get("enableInTreeAutoscaling") or cluster["autoscalerOptions"].get("version") != "v2":
        yield "the in-tree autoscaler must be on, as version v2"
    strategy = m.ray_service["spec"]["upgradeStrategy"]
    if strategy["type"] == "NewClusterWithIncrementalUpgrade":
        options = strategy["clusterUpgradeOptions"]
        if not 0 < options["stepSizePercent"] <= options["maxSurgePercent"] <= 100:
            yield "clusterUpgradeOptions: stepSizePercent must be within maxSurgePercent, and that within 100"


def kuberay_accepts_groups(m: Manifests) -> Iterator[str]:
    for group in [m.head, *m.worker_groups]:
        if group["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield "autoscaler v2 wants restartPolicy Never"
    for group in m.worker_groups:
        if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            yield f"{group['groupName']}: minReplicas, replicas and maxReplicas are not in this order"


RULES: tuple[Rule, ...] = (
    network_rules.serve_ports_agree,
    network_rules.services_reach_ports,
    network_rules.redis_is_found,
    network_rules.selectors_select,
    network_rules.networks_are_closed,
    network_rules.redis_is_reached,
    pod_rules.pods_are_complete,
    pod_rules.containers_are_confined,
    pod_rules.probes_ask_the_right_thing,
    pod_rules.images_are_named,
    pod_rules.redis_keeps_its_data,
    pod_rules.capacity_suffices,
    secrets_are_documented,
    times_are_ordered,
    environment_is_complete,
    kuberay_accepts,
    kuberay_accepts_groups,
)
