"""The time limits of a stop fit into each other: the front door's wait <= drain < Serve's limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.config import STOP_MARGIN_S, ClusterConfig, IndexConfig, ServeConfig
from cluster.launcher import stopped_at_once
from cluster.ray_environment import ray_environment


def front_door_wait_s(drain_s: float) -> float:
    return float(ray_environment(Path("."), drain_s)["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"])


@pytest.mark.parametrize("drain_s", [0.5, 2.0, 30.0, 600.0])
def test_each_limit_allows_for_the_one_before(drain_s: float) -> None:
    serve = ServeConfig(drain_s=drain_s)
    assert front_door_wait_s(drain_s) <= serve.drain_s < serve.stop_limit_s == drain_s + STOP_MARGIN_S
    assert front_door_wait_s(drain_s) <= 2.0, "an idle front door stops soon"


def test_a_local_cluster_stops_at_once_unless_told_otherwise() -> None:
    local = stopped_at_once(ClusterConfig())
    assert local.serve.stop_limit_s == front_door_wait_s(local.serve.drain_s) == 0
    assert ClusterConfig().serve.drain_s > 0
    asked = ClusterConfig(serve=ServeConfig(drain_s=30))
    assert stopped_at_once(asked) == asked


def limits_of(application: Any) -> dict[str, float]:
    """Of the front door and, found among what it is given, of the workers."""
    found, open_ends = {}, [application]
    for one in open_ends:
        deployment = one._bound_deployment
        found[deployment.name] = deployment._deployment_config.graceful_shutdown_timeout_s
        open_ends += [given for given in deployment.init_args if hasattr(given, "_bound_deployment")]
    return found


def test_both_deployments_have_the_limit() -> None:
    from cluster.app import build_app

    config = ClusterConfig(index=IndexConfig(redis_url="redis://127.0.0.1:1"), serve=ServeConfig(drain_s=7))
    assert limits_of(build_app(config)) == {"Ingress": 17.0, "LLMWorker": 17.0}
