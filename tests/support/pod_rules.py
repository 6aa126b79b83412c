"""Rules about what a pod may do, how it is watched, and how large it is. A rule yields what is wrong, one line each."""

from __future__ import annotations

import re
from collections.abc import Iterator

from manifests import Manifests, configs, most_replicas, project_version

_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_UNITS = {"": 1, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text: object) -> float:
    """A Kubernetes quantity as a number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", str(text))
    assert match, text
    return float(match[1]) * _UNITS[match[2]]


def pods_are_complete(m: Manifests) -> Iterator[str]:
    claims = [claim for document in m.of_kind("StatefulSet") for claim in document["spec"]["volumeClaimTemplates"]]
    for pod in m.pods:
        if not (pod.spec["securityContext"].get("runAsNonRoot") and pod.spec["securityContext"].get("runAsUser")):
            yield f"{pod.owner}: it may run as root"
        volumes = {volume["name"] for volume in pod.spec["volumes"]} | {claim["metadata"]["name"] for claim in claims}
        for container in pod.containers:
            strange = {mount["name"] for mount in container["volumeMounts"]} - volumes
            yield from (f"{pod.owner}: there is no volume {name}" for name in strange)
            yield from (f"{pod.owner}: no {probe}" for probe in _PROBES if probe not in container)


def containers_are_confined(m: Manifests) -> Iterator[str]:
    places = [(pod.owner, container) for pod in m.pods for container in pod.containers]
    for owner, container in [*places, ("autoscaler", m.ray_cluster["autoscalerOptions"])]:
        context = container.get("securityContext", {})
        if context.get("allowPrivilegeEscalation") is not False or context.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{owner}: it may gain privileges"
        if context.get("readOnlyRootFilesystem") is not True:
            yield f"{owner}: it may write to its image"
        for part in ("requests", "limits"):
            if not {"cpu", "memory"} <= set(container.get("resources", {}).get(part, {})):
                yield f"{owner}: {part} must name cpu and memory"


def probes_ask_the_right_thing(m: Manifests) -> Iterator[str]:
    for pod in m.ray_pods():
        (container,) = pod.containers
        asked = {kind: container[kind]["httpGet"] for kind in _PROBES if kind in container}
        for kind, probe in asked.items():
            if probe["port"] not in pod.ports():
                yield f"{pod.owner}: the {kind} asks a port {probe['port']} that it does not have"
        ready = {"path": "/ready", "port": "serve"}
        own_node = {"path": "/api/healthz", "port": "agent"}
        if pod.is_head:
            # KubeRay deploys the application when the head is ready: waiting for it would wait for ever.
            if any(probe != own_node for probe in asked.values()):
                yield "the head's probes must ask its own node alone"
            continue
        if asked.pop("readinessProbe", None) != ready:
            yield "a worker is ready when the front door says so on /ready"
        if any(probe != own_node for probe in asked.values()):
            yield "whether a worker has started and lives must not depend on other nodes"


def images_are_named(m: Manifests) -> Iterator[str]:
    version = project_version()
    for pod in m.pods:
        image = pod.containers[0]["image"]
        name, _, tag = image.partition(":")
        if "." in name or not tag:
            yield f"{pod.owner}: the image {image} must have a tag, and its registry comes from kustomize's `images`"
        if pod.is_ray and tag not in (version, f"{version}-cuda"):
            yield f"{pod.owner}: the image {image} is not of version {version}"
        if "nvidia.com/gpu" in pod.containers[0]["resources"]["limits"] and not tag.endswith("-cuda"):
            yield f"{pod.owner}: it has a GPU, and the image {image} is the one for CPUs"


def redis_keeps_its_data(m: Manifests) -> Iterator[str]:
    settings = dict(line.split(maxsplit=1) for line in m.valkey_conf.splitlines() if line and line[0] != "#")
    (container,) = m.redis_pod().containers
    if int(settings["port"]) != m.redis_pod().ports()["redis"]:
        yield "valkey.conf: another port than the container's"
    if settings["maxmemory-policy"] != "noeviction":
        yield "valkey.conf: eviction would lose the state of Ray's head"
    if settings["appendonly"] != "yes":
        yield "valkey.conf: nothing is kept on disk"
    if settings["dir"] not in [mount["mountPath"] for mount in container["volumeMounts"]]:
        yield f"valkey.conf: nothing is mounted at {settings['dir']}"
    limit = quantity(container["resources"]["limits"]["memory"])
    if 2 * quantity(settings["maxmemory"].removesuffix("b").upper() + "i") > limit:
        yield "valkey: rewriting its log may take twice maxmemory, and its memory limit is less"
    (claim,) = m.of_kind("StatefulSet")[0]["spec"]["volumeClaimTemplates"]
    if quantity(claim["spec"]["resources"]["requests"]["storage"]) < 2 * limit:
        yield "valkey: its disk must hold the old log and the new one"


def capacity_suffices(m: Manifests) -> Iterator[str]:
    """The largest number of replicas, and the front doors, fit into the largest number of nodes."""
    budget = m.one("PodDisruptionBudget", "kvray-workers")["spec"]["minAvailable"]
    if not isinstance(budget, int) or budget >= sum(group["minReplicas"] for group in m.worker_groups):
        yield "the PodDisruptionBudget would block every node drain"
    places = 0
    for group in m.worker_groups:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        for config in configs(m):
            serve = config.serve
            fit = (quantity(limits["cpu"]) - 0.1 * config.router.replicas) / serve.cpus_per_replica
            if serve.gpus_per_replica:
                fit = min(fit, quantity(limits.get("nvidia.com/gpu", 0)) / serve.gpus_per_replica)
            places += int(fit) * group["maxReplicas"]
            if int(fit) * (config.engine.cache.kv_memory or 0) >= quantity(limits["memory"]):
                yield f"{group['groupName']}: the KV pools of a node do not fit into its memory limit"
    replicas = sum(most_replicas(config) for config in configs(m))
    if places < replicas:
        yield f"{replicas} replicas are wanted, and the worker groups have room for {places}"
