"""The `autoscaling` part: bounds, how it fits the rest, and that the application uses it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cluster.app import build_app
from cluster.autoscaling import POLICY_PATH
from cluster.config import AutoscalingConfig, ClusterConfig, IndexConfig, ServeConfig
from cluster.serve_command import with_threads


def config(**scaling: Any) -> ClusterConfig:
    return ClusterConfig(
        serve=ServeConfig(replicas=2, drain_s=30.0),
        index=IndexConfig(redis_url="redis://127.0.0.1:1/0"),
        autoscaling=AutoscalingConfig(**{"max_replicas": 8, **scaling}),
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"min_replicas": 5, "max_replicas": 4}, "above max_replicas"),
        ({"max_replicas": 0}, "max_replicas"),
        ({"min_replicas": -1, "max_replicas": 4}, "min_replicas"),
        ({}, "max_replicas"),
        ({"max_replicas": 4, "utilisation": 1.0}, "utilisation"),
        ({"max_replicas": 4, "margin": -0.1}, "margin"),
        ({"max_replicas": 4, "ttft_target_s": 0}, "ttft_target_s"),
        ({"max_replicas": 4, "look_back_s": 1}, "look_back_s"),
        ({"max_replicas": 4, "start_s": float("nan")}, "start_s"),
        ({"max_replicas": 4, "max_replica": 3}, "max_replica"),
    ],
)
def test_wrong_values_are_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        AutoscalingConfig(**wrong)


@pytest.mark.parametrize("replicas", [1, 9])
def test_the_first_number_of_replicas_must_be_within_the_bounds(replicas: int) -> None:
    with pytest.raises(ValidationError, match="the number at first"):
        ClusterConfig(
            serve=ServeConfig(replicas=replicas, drain_s=30.0),
            autoscaling=AutoscalingConfig(min_replicas=2, max_replicas=8),
        )


def test_replicas_that_go_must_be_able_to_finish() -> None:
    with pytest.raises(ValidationError, match="drain_s"):
        ClusterConfig(serve=ServeConfig(drain_s=0), autoscaling=AutoscalingConfig(max_replicas=8))


def test_it_survives_the_way_to_other_processes() -> None:
    assert ClusterConfig.model_validate(config().model_dump()) == config()
    assert config().autoscaling is not None and ClusterConfig().autoscaling is None


def test_cores_are_shared_between_the_most_replicas_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(16)), raising=False)
    assert with_threads(config()).engine.threads == 2


def test_the_application_scales_its_workers_and_nothing_else() -> None:
    front_door = build_app(config())._bound_deployment
    (workers,) = [one._bound_deployment for one in front_door.init_args if hasattr(one, "_bound_deployment")]
    scaling = workers._deployment_config.autoscaling_config
    assert scaling.policy.policy_function == POLICY_PATH
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (1, 2, 8)
    assert workers._deployment_config.graceful_shutdown_timeout_s == config().serve.stop_limit_s
    assert front_door._deployment_config.autoscaling_config is None


def test_without_it_the_number_is_fixed() -> None:
    fixed = ClusterConfig(serve=ServeConfig(replicas=3), index=IndexConfig(redis_url="redis://127.0.0.1:1/0"))
    front_door = build_app(fixed)._bound_deployment
    (workers,) = [one._bound_deployment for one in front_door.init_args if hasattr(one, "_bound_deployment")]
    assert workers._deployment_config.autoscaling_config is None
    assert workers._deployment_config.num_replicas == 3


def told(config: ClusterConfig) -> list[ClusterConfig]:
    """To each deployment, as it reads it."""
    front_door = build_app(config)._bound_deployment
    (workers,) = [one for one in front_door.init_args if hasattr(one, "_bound_deployment")]
    dumped = [workers._bound_deployment.init_args[0], front_door.init_args[1]]
    return [ClusterConfig.model_validate(one) for one in dumped]


def test_replicas_can_read_what_they_are_told_whatever_the_bounds() -> None:
    """The counts were left out once, and the default of 2 replicas is not within every bounds."""
    index = IndexConfig(redis_url="redis://127.0.0.1:1/0")
    for low, first, high in ((0, 1, 1), (3, 4, 8), (1, 1, 1)):
        scaling = AutoscalingConfig(
            min_replicas=low, max_replicas=high, ttft_target_s=7.0, coldest_victim=True, down_delay_s=first
        )
        for one in told(ClusterConfig(serve=ServeConfig(replicas=first), index=index, autoscaling=scaling)):
            assert one.autoscaling is not None and (one.autoscaling.min_replicas == 0) == (low == 0)
            assert (one.autoscaling.ttft_target_s, one.autoscaling.coldest_victim) == (7.0, True)


def test_what_they_are_told_does_not_change_with_their_number() -> None:
    index = IndexConfig(redis_url="redis://127.0.0.1:1/0")
    small = ClusterConfig(index=index, autoscaling=AutoscalingConfig(max_replicas=4))
    large = ClusterConfig(
        serve=ServeConfig(replicas=5),
        index=index,
        autoscaling=AutoscalingConfig(min_replicas=3, max_replicas=9, down_delay_s=7, utilisation=0.3),
    )
    assert told(small) == told(large)
