"""The `ray up` files pass Ray's own validator, and agree with the code: flags, ports, the deployed application."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.config import ServeConfig
from cluster.ray_environment import REDIS_URL_VARIABLE, cluster_environment
from cluster.serve_file import read_serve_file

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "cluster" / "ray_up"
FILES = ("aws", "onprem")


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return document


def valid(document: dict[str, Any]) -> dict[str, Any]:
    prepared: dict[str, Any] = prepare_config(copy.deepcopy(document))
    validate_config(prepared)
    return prepared


@pytest.mark.parametrize("name", FILES)
def test_ray_accepts_the_file(name: str) -> None:
    prepared = valid(load(name))
    assert prepared["head_node_type"] in prepared["available_node_types"]
    assert sum(node.get("min_workers", 0) for node in prepared["available_node_types"].values()) >= 1


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ((), {"setup_command": []}),
        (("auth",), {"ssh_usr": "x"}),
        ((), {"setup_commands": "ls"}),
        ((), {"max_workers": "two"}),
    ],
)
def test_ray_refuses_the_file_with_a_mistake_in_it(name: str, part: tuple[str, ...], wrong: dict[str, Any]) -> None:
    document = load(name)
    place = document
    for step in part:
        place = place[step]
    place.update(wrong)
    with pytest.raises((jsonschema.ValidationError, TypeError)):
        valid(document)


def test_ray_refuses_a_wrong_node_type_and_a_wrong_security_group() -> None:
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda d: d["available_node_types"]["gpu"].update(min_worker=1),
        lambda d: d["provider"]["security_group"].update(Ports=[]),
        lambda d: d["available_node_types"]["gpu"].pop("node_config"),
    ]
    for change in changes:
        document = load("aws")
        change(document)
        with pytest.raises((jsonschema.ValidationError, KeyError)):
            valid(document)


def drain_of_the_deployed_model() -> float:
    (model,) = read_serve_file(FOLDER / "serve_gpu.yaml").models
    return model.config.serve.drain_s


def flags_in(document: dict[str, Any]) -> dict[str, str]:
    (command,) = [line for line in document["setup_commands"] if line.endswith("> ~/.kvray/ray.env")]
    return dict(word.split("=", 1) for word in shlex.split(command) if re.fullmatch(r"[A-Z_0-9a-z]+=.*", word))


@pytest.mark.parametrize("name", FILES)
def test_every_ray_process_has_the_flags_of_the_code(name: str) -> None:
    document = load(name)
    assert flags_in(document) == cluster_environment(drain_of_the_deployed_model())
    for command in document["head_start_ray_commands"] + document["worker_start_ray_commands"]:
        assert command.startswith(". ~/.kvray/env.sh;"), command
    (environment,) = [line for line in document["setup_commands"] if line.endswith("> ~/.kvray/env.sh")]
    words = shlex.split(environment)
    places = [words.index(word) for word in ("set -a", ". ~/.kvray/ray.env", ". ~/.kvray/secrets.env", "set +a")]
    assert places == sorted(places)


@pytest.mark.parametrize("name", FILES)
def test_secrets_come_from_a_file_that_is_not_in_the_tree(name: str) -> None:
    text, document = (FOLDER / f"{name}.yaml").read_text(), load(name)
    assert document["file_mounts"]["~/.kvray/secrets.env"] == "~/.kvray/secrets.env"
    assert f"{REDIS_URL_VARIABLE}=" in text
    used = "\n".join(document["setup_commands"] + document["head_start_ray_commands"])
    assert "RAY_AUTH_TOKEN" not in used and "redis://" not in used
    assert "chmod 600 ~/.kvray/secrets.env" in document["setup_commands"]


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_to_the_nodes_exists(name: str) -> None:
    mounts = {remote: local for remote, local in load(name)["file_mounts"].items() if not local.startswith("~")}
    assert set(mounts.values()) >= {"cluster", "router", "worker", "pyproject.toml", "constraints.txt"}
    for remote, local in mounts.items():
        assert (ROOT / local).exists() and remote == f"~/kvray/{local}"


@pytest.mark.parametrize("name", FILES)
def test_the_dashboard_and_the_job_api_are_closed(name: str) -> None:
    head = " ".join(load(name)["head_start_ray_commands"])
    assert "--dashboard-host=127.0.0.1" in head
    ports = {word for word in head.split() if word.startswith("--port=")}
    (worker,) = [line for line in load(name)["worker_start_ray_commands"] if "ray start" in line]
    assert ports == {"--port=6379"} and "--address=$RAY_HEAD_IP:6379" in worker


@pytest.mark.parametrize("name", FILES)
def test_head_and_workers_use_the_same_ports(name: str) -> None:
    document = load(name)
    starts = [
        next(line for line in document[f"{kind}_start_ray_commands"] if "ray start" in line)
        for kind in ("head", "worker")
    ]
    head, worker = (dict(re.findall(r"--([a-z-]+-port)=(\d+)", start)) for start in starts)
    assert head == worker and len(set(head.values())) == len(head) == 6
    assert not set(head.values()) & {str(ServeConfig().port), str(ServeConfig().grpc_port)}


def test_the_security_group_opens_kvrays_ports_and_no_other() -> None:
    rules = load("aws")["provider"]["security_group"]["IpPermissions"]
    assert {rule["FromPort"] for rule in rules} == {ServeConfig().port, ServeConfig().grpc_port}
    for rule in rules:
        assert rule["FromPort"] == rule["ToPort"] and rule["IpProtocol"] == "tcp"
        assert all(entry["CidrIp"] != "0.0.0.0/0" for entry in rule["IpRanges"])


def test_the_deployed_file_has_kvrays_ports_and_asks_for_a_gpu() -> None:
    (model,) = read_serve_file(FOLDER / "serve_gpu.yaml").models
    serve = model.config.serve
    assert (serve.port, serve.grpc_port) == (ServeConfig().port, ServeConfig().grpc_port)
    assert serve.gpus_per_replica == 1 and model.config.engine.device == "cuda"
    assert model.config.index.redis_url is None
    mounted = load("onprem")["file_mounts"]["~/kvray/cluster"]
    assert mounted == "cluster" and "serve deploy ~/kvray/cluster/ray_up/serve_gpu.yaml" in (
        (FOLDER / "onprem.yaml").read_text()
    )


def test_a_local_head_does_not_count_as_a_worker() -> None:
    document = load("onprem")
    assert any("RAY_enable_autoscaler_v2=0 ray start --head" in line for line in document["head_start_ray_commands"])
    assert document["min_workers"] == document["max_workers"] == len(document["provider"]["worker_ips"])
