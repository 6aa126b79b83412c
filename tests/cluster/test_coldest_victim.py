"""coldest_victim on Serve's own scheduler: who goes, when it keeps out of it, and what it does on another version."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.deployment_scheduler import DeploymentScheduler, SpreadDeploymentSchedulingPolicy
from ray.serve._private.deployment_state import DeploymentState

from cluster import coldest_victim
from cluster.config import AutoscalingConfig
from cluster.ray_environment import ray_environment

DEPLOYMENT = DeploymentID(name="LLMWorker", app_name="kvray")
SCALE, STOP = DeploymentState.scale_deployment_replicas, DeploymentScheduler._get_replicas_to_stop


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeploymentState, "scale_deployment_replicas", SCALE)
    monkeypatch.setattr(DeploymentScheduler, "_get_replicas_to_stop", STOP)


def replica(number: int) -> ReplicaID:
    return ReplicaID(f"r{number}", DEPLOYMENT)


def scheduler(nodes: list[str]) -> DeploymentScheduler:
    """Replica n runs on nodes[n]; the head is node `head`."""
    cache = SimpleNamespace(get_node_labels=lambda node: {})
    made = DeploymentScheduler(cache, "head", lambda *args: None)
    made.on_deployment_created(DEPLOYMENT, SpreadDeploymentSchedulingPolicy())
    for number, node in enumerate(nodes):
        made.on_replica_running(replica(number), node)
    return made


def report(heats: dict[int, Any]) -> None:
    """As the controller's loop does, right before it chooses."""
    replicas = [
        SimpleNamespace(replica_id=replica(n), routing_stats={} if heat is None else {"heat": heat})
        for n, heat in heats.items()
    ]
    state = SimpleNamespace(
        _id=DEPLOYMENT,
        _replicas=SimpleNamespace(get=lambda: replicas),
        is_ingress_request_router=lambda: False,
        _in_transition=False,
    )
    assert DeploymentState.scale_deployment_replicas(state) == ([], None)


def stopped(made: DeploymentScheduler, count: int) -> set[str]:
    return {one.unique_id for one in made._get_replicas_to_stop(DEPLOYMENT, count)}


def test_serve_itself_stops_the_oldest_where_each_has_a_node_and_installed_the_coldest_goes() -> None:
    made = scheduler(["n0", "n1", "n2", "n3"])
    assert stopped(made, 1) == {"r0"}
    coldest_victim.install()
    report({0: 9.0, 1: 4.0, 2: 1.0, 3: 5.0})
    assert stopped(made, 1) == {"r2"}
    assert stopped(made, 3) == {"r2", "r1", "r3"}
    report({0: 0.0, 1: 4.0, 2: 1.0, 3: 5.0})
    assert stopped(made, 1) == {"r0"}


def test_the_controllers_log_says_who_went_and_how_hot_all_were(caplog: pytest.LogCaptureFixture) -> None:
    made = scheduler(["n0", "n1"])
    with caplog.at_level(logging.INFO, "ray.serve"):
        coldest_victim.install()
        report({0: 9.0, 1: 2.5})
        stopped(made, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "replicas with the coldest caches go first",
        "the coldest go: ['r1']; heat of those that run: r0 9, r1 2.5",
    ]


def test_those_that_do_not_run_go_first_and_the_heads_node_last() -> None:
    coldest_victim.install()
    made = scheduler(["head", "n1", "n2"])
    made.on_replica_recovering(replica(7))
    report({0: 0.0, 1: 4.0, 2: 1.0})
    assert stopped(made, 1) == {"r7"}
    assert stopped(made, 2) == {"r7", "r2"}
    assert stopped(made, 3) == {"r7", "r2", "r1"}


def test_one_that_has_not_told_its_heat_yet_is_cold() -> None:
    coldest_victim.install()
    made = scheduler(["n0", "n1", "n2"])
    report({0: 3.0, 1: None, 2: 5.0})
    assert stopped(made, 1) == {"r1"}


@pytest.mark.parametrize("heats", [{}, {0: None, 1: None}, {0: "hot", 1: True}])
def test_without_heat_serve_chooses(heats: dict[int, Any]) -> None:
    coldest_victim.install()
    made = scheduler(["n0", "n1"])
    report(heats)
    assert stopped(made, 1) == {"r0"}


def test_gangs_are_left_to_serve() -> None:
    coldest_victim.install()
    made = scheduler(["n0", "n1"])
    report({0: 9.0, 1: 1.0})
    gangs = {replica(0): "a", replica(1): "b"}
    chosen = made._get_replicas_to_stop(
        DEPLOYMENT,
        1,
        gang_id_by_replica=gangs,
        replicas_by_gang_id={"a": {replica(0)}, "b": {replica(1)}},
        gang_size=1,
    )
    assert chosen == {replica(0)}


def test_another_version_is_left_alone_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray, "__version__", "2.61.0")
    with caplog.at_level(logging.INFO, "ray.serve"):
        coldest_victim.install()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "2.61.0" in caplog.text
    assert DeploymentState.scale_deployment_replicas is SCALE and DeploymentScheduler._get_replicas_to_stop is STOP


def test_a_method_that_looks_different_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other(self: Any, deployment_id: Any, count: int) -> set[Any]:
        return set()

    monkeypatch.setattr(DeploymentScheduler, "_get_replicas_to_stop", other)
    coldest_victim.install()
    assert len(caplog.records) == 1 and "not as expected" in caplog.text
    assert DeploymentScheduler._get_replicas_to_stop is other and DeploymentState.scale_deployment_replicas is SCALE


def test_it_is_off_unless_asked_for(tmp_path: Any) -> None:
    name = "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH"
    assert not AutoscalingConfig(max_replicas=2).coldest_victim
    assert name not in ray_environment(tmp_path, 0.0)
    assert ray_environment(tmp_path, 0.0, coldest_victim=True)[name] == coldest_victim.INSTALL_PATH
