"""A redeploy, as Serve's controller judges it: which replicas it replaces, and which it leaves as they are.

Serve's own code builds and compares the versions, on both ways into a cluster; no cluster runs.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any

import pytest
from ray.serve._private.build_app import build_app as build_as_serve_does
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deploy_utils import get_app_code_version, get_deploy_args
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.deployment_state import DeploymentTargetState
from ray.serve._private.version import DeploymentVersion
from ray.serve.schema import ServeApplicationSchema

from cluster import pinned_version
from cluster.app import build_app
from cluster.config import ClusterConfig
from cluster.pinned_version import version_of

SCALING = {"min_replicas": 1, "max_replicas": 4}
BASE: dict[str, Any] = {
    "engine": {"model": "owner/model"},
    "index": {"redis_url": "redis://127.0.0.1:1/0"},
    "serve": {"replicas": 2},
    "autoscaling": SCALING,
}
NOBODY: set[str] = set()
WORKERS, DOORS, ALL = {"LLMWorker"}, {"Ingress"}, {"LLMWorker", "Ingress"}

CHANGES: list[tuple[dict[str, Any], set[str]]] = [
    ({}, NOBODY),
    ({"autoscaling": {**SCALING, "max_replicas": 9}}, NOBODY),
    ({"autoscaling": {**SCALING, "min_replicas": 2, "down_delay_s": 7, "utilisation": 0.3}}, NOBODY),
    ({"serve": {"replicas": 3}}, NOBODY),
    ({"router": {"replicas": 3}}, NOBODY),
    ({"router": {"near_tie": 0.2}}, DOORS),
    ({"router": {"policy": "round_robin"}}, DOORS),
    ({"router": {"start_wait_s": 5}}, DOORS),
    ({"autoscaling": {**SCALING, "min_replicas": 0}}, DOORS),
    ({"engine": {"model": "owner/model", "cache": {"kv_memory": "1GiB"}}}, WORKERS),
    ({"engine": {"model": "owner/model", "max_queue": 5}}, WORKERS),
    ({"serve": {"replicas": 2, "drain_s": 50}}, WORKERS),
    ({"serve": {"replicas": 2, "gpus_per_replica": 1}}, WORKERS),
    ({"autoscaling": {**SCALING, "ttft_target_s": 1.0}}, WORKERS),
    ({"autoscaling": {**SCALING, "coldest_victim": True}}, WORKERS),
    ({"engine": {"model": "owner/other"}}, ALL),
    ({"engine": {"model": "owner/model", "cache": {"chunk_tokens": 32}}}, ALL),
    ({"engine": {"model": "owner/model", "token_budget": 512}}, ALL),
    ({"engine": {"model": "owner/model", "max_num_seqs": 5}}, ALL),
    ({"index": {"redis_url": "redis://127.0.0.1:2/0"}}, ALL),
    ({"served_model_name": "mine"}, ALL),
]


def versions(changes: dict[str, Any], of_the_application: str) -> dict[str, DeploymentVersion]:
    """As Serve's controller keeps them, after it was sent the deployments with its own version for them."""
    built = build_as_serve_does(build_app(ClusterConfig.model_validate({**BASE, **changes})), name="kvray")
    found = {}
    for deployment in built.deployments:
        config = deepcopy(deployment._deployment_config)
        config.version = of_the_application  # as get_deploy_args, which needs a running Ray
        sent = DeploymentConfig.from_proto_bytes(config.to_proto_bytes())
        info = DeploymentInfo(sent, deployment._replica_config, 0, "", version=sent.version, route_prefix="/")
        version = DeploymentTargetState.create(info, 2).version
        assert version is not None
        found[deployment.name] = version
    return found


def replaced(before: dict[str, DeploymentVersion], after: dict[str, DeploymentVersion]) -> set[str]:
    return {name for name, version in before.items() if version.requires_actor_restart(after[name])}


@pytest.mark.parametrize("changes,concerned", CHANGES, ids=lambda value: str(value))
def test_who_is_replaced(changes: dict[str, Any], concerned: set[str]) -> None:
    assert replaced(versions({}, "one"), versions(changes, "two")) == concerned


def test_serve_would_replace_all_for_any_change() -> None:
    """So the rest of this file is about something. `serve.run` draws the application's version, a file's is a hash."""
    file = {"name": "kvray", "import_path": "cluster.serve_app:build", "args": BASE}
    other = {**file, "args": {**BASE, "router": {"near_tie": 0.2}}}
    one, two = (get_app_code_version(ServeApplicationSchema.model_validate(each)) for each in (file, other))
    assert one != two
    assert "deployment_config.version = version" in source_of(get_deploy_args)


def source_of(function: Any) -> str:
    import inspect

    return inspect.getsource(function)


def test_where_serve_works_differently_it_replaces_all_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(DeploymentConfig, "to_proto_bytes", lambda self: b"")
    with caplog.at_level(logging.WARNING, pinned_version.__name__):
        built = build_app(ClusterConfig.model_validate(BASE))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "every redeploy will replace all replicas"
    ] * 2
    config = built._bound_deployment._deployment_config
    assert type(config) is DeploymentConfig and config.version is None


def test_a_version_stands_for_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert version_of({"a": 1, "b": 2}) == version_of({"b": 2, "a": 1}) != version_of({"a": 1, "b": 3})
    before = version_of({})
    monkeypatch.setattr(pinned_version, "installed", lambda name: "another release")
    assert version_of({}) != before
