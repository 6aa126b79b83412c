"""Rules about ports, names, selectors and network policies. A rule yields what is wrong, one line each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from manifests import Manifests, Pod, environment_of

from cluster.ray_environment import REDIS_URL_VARIABLE


def serve_ports_agree(m: Manifests) -> Iterator[str]:
    """The Serve config and the pods; cluster.serve_file checks the former against its own arguments."""
    serve = m.serve_config
    wanted = {"serve": serve["http_options"]["port"], "serve-grpc": serve["grpc_options"]["port"]}
    if serve["http_options"]["host"] != "0.0.0.0":
        yield "http_options: nobody outside the pod reaches the host"
    for pod in m.ray_pods():
        for name, port in wanted.items():
            if pod.ports().get(name) != port:
                yield f"{pod.owner}: its port {name} is not {port}"
        if "metrics" not in pod.ports():
            yield f"{pod.owner}: no port metrics"


def services_reach_ports(m: Manifests) -> Iterator[str]:
    for service in m.of_kind("Service"):
        name = service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            for pod in m.selected(service["spec"]["selector"]):
                number = pod.ports().get(port["targetPort"])
                if number is None:
                    yield f"Service {name}: {pod.owner} has no port {port['targetPort']}"
                elif port["port"] != number:
                    yield f"Service {name}: port {port['port']} is another one in {pod.owner}"
    for monitor in m.of_kind("PodMonitor"):
        pods = m.selected(monitor["spec"]["selector"]["matchLabels"])
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if not any(endpoint["port"] in pod.ports() for pod in pods):
                yield f"PodMonitor: no pod has a port {endpoint['port']}"


def redis_is_found(m: Manifests) -> Iterator[str]:
    address = m.redis_address
    options = m.ray_cluster["gcsFaultToleranceOptions"]
    if options["redisAddress"] != address:
        yield f"gcsFaultToleranceOptions: redisAddress is not {address}"
    if "externalStorageNamespace" in options:
        yield "gcsFaultToleranceOptions: two clusters of an upgrade would share externalStorageNamespace"
    for pod in m.ray_pods():
        variables = environment_of(pod.containers[0])
        url = f"redis://:$(KVRAY_REDIS_PASSWORD)@{address}/0"
        if variables.get(REDIS_URL_VARIABLE, {}).get("value") != url:
            yield f"{pod.owner}: {REDIS_URL_VARIABLE} is not {url}"
        names = [name for name in variables if name.startswith("KVRAY_REDIS_")]
        if names != ["KVRAY_REDIS_PASSWORD", "KVRAY_REDIS_URL"]:
            yield f"{pod.owner}: KVRAY_REDIS_PASSWORD must stand before KVRAY_REDIS_URL, which uses it"


def _selector(document: dict[str, Any]) -> dict[str, str] | None:
    spec: dict[str, Any] = document.get("spec", {})
    if document["kind"] == "Service":
        return dict(spec["selector"])
    if document["kind"] == "NetworkPolicy":
        return dict(spec["podSelector"]["matchLabels"])
    if document["kind"] in ("PodDisruptionBudget", "StatefulSet", "PodMonitor"):
        return dict(spec["selector"]["matchLabels"])
    return None


def selectors_select(m: Manifests) -> Iterator[str]:
    for document in m.documents:
        place = f"{document['kind']} {document['metadata']['name']}"
        selector = _selector(document)
        if selector is None:
            continue
        pods = m.selected(selector)
        if not pods:
            yield f"{place}: it selects no pod"
        if document["kind"] in ("Service", "PodDisruptionBudget") and any(pod.is_head for pod in pods):
            yield f"{place}: it selects the head"
        if document["kind"] == "PodMonitor":
            yield from (f"{pod.owner}: it is not monitored" for pod in m.ray_pods() if pod not in pods)


def networks_are_closed(m: Manifests) -> Iterator[str]:
    covered: list[Pod] = []
    for policy in m.of_kind("NetworkPolicy"):
        spec, name = policy["spec"], policy["metadata"]["name"]
        pods = m.selected(spec["podSelector"]["matchLabels"])
        covered += pods
        if set(spec["policyTypes"]) != {"Ingress", "Egress"}:
            yield f"NetworkPolicy {name}: it must say what comes in and what goes out"
        for rule in spec["ingress"]:
            if not rule.get("from"):
                yield f"NetworkPolicy {name}: everybody may come in"
            for port in rule.get("ports", []):
                if not any(port["port"] in pod.ports() for pod in pods):
                    yield f"NetworkPolicy {name}: no pod has a port {port['port']}"
    yield from (f"{pod.owner}: no NetworkPolicy" for pod in m.pods if pod not in covered)


def redis_is_reached(m: Manifests) -> Iterator[str]:
    """By the Ray pods, and by nobody else."""
    rules = m.one("NetworkPolicy", "kvray-redis")["spec"]["ingress"]
    peers = [peer for rule in rules for peer in rule["from"]]
    if any("namespaceSelector" in peer for peer in peers):
        yield "Redis: other namespaces may come in"
    allowed = [pod for peer in peers for pod in m.selected(peer["podSelector"].get("matchLabels", {}))]
    yield from (f"{pod.owner}: it may not speak to Redis" for pod in m.ray_pods() if pod not in allowed)
    if m.redis_pod() in allowed:
        yield "Redis: every pod of the namespace may come in"
    outgoing = m.one("NetworkPolicy", "kvray-ray")["spec"]["egress"]
    labels = [peer["podSelector"]["matchLabels"] for rule in outgoing for peer in rule.get("to", [])]
    if not any(m.redis_pod().matches(wanted) for wanted in labels):
        yield "the Ray pods may not go out to Redis"
