"""What replicas are told: all that they read, and nothing that would have them replaced for others' sake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cluster.config import AutoscalingConfig, ClusterConfig, IndexConfig, ServeConfig
from cluster.replica_args import told_to_front_doors, told_to_workers

INDEX = IndexConfig(redis_url="redis://127.0.0.1:1/0")


@pytest.mark.parametrize("low,first,high", [(0, 1, 1), (3, 4, 8), (1, 1, 1)])
def test_they_can_read_it_whatever_the_bounds(low: int, first: int, high: int) -> None:
    """The counts were left out once, and the default of 2 replicas is not within every bounds."""
    scaling = AutoscalingConfig(min_replicas=low, max_replicas=high, ttft_target_s=7.0, coldest_victim=True)
    config = ClusterConfig(serve=ServeConfig(replicas=first), index=INDEX, autoscaling=scaling)
    worker, door = (again(told(config)) for told in (told_to_workers, told_to_front_doors))
    assert worker.autoscaling is not None
    assert (worker.autoscaling.ttft_target_s, worker.autoscaling.coldest_victim) == (7.0, True)
    assert (door.autoscaling is not None and door.autoscaling.min_replicas == 0) == (low == 0)


def test_nothing_else_is_read() -> None:
    """An option that is not told has its default there, silently."""
    parts = ("model", "token_budget", "max_num_seqs", "ageing_s", "cache.chunk_tokens")
    of_the_engine = {f"engine.{part}" for part in parts}
    assert options_read("router/ingress.py") == {"autoscaling", *of_the_engine}
    assert options_read("worker/deployment.py") - {"engine"} <= {"autoscaling", "serve.drain_s", *of_the_engine}


def options_read(module: str) -> set[str]:
    """Of the parts that are told in part."""
    source = (Path(__file__).parents[2] / module).read_text()
    return set(re.findall(r"self\._config\.((?:engine|serve|autoscaling)[\w.]*)", source))


def again(config: ClusterConfig) -> ClusterConfig:
    return ClusterConfig.model_validate(config.model_dump())


def test_both_are_told_all_that_they_read() -> None:
    given: dict[str, Any] = {
        "engine": {
            "model": "a/b",
            "token_budget": 77,
            "max_num_seqs": 9,
            "ageing_s": 1.5,
            "max_queue": 5,
            "cache": {"chunk_tokens": 96, "block_size": 32},
        },
        "index": {"redis_url": "redis://127.0.0.1:1/0", "key_prefix": "other"},
        "router": {"policy": "round_robin", "near_tie": 0.5, "start_wait_s": 9.0},
        "serve": {"drain_s": 44.0},
    }
    config = ClusterConfig.model_validate(given)
    worker, door = told_to_workers(config), told_to_front_doors(config)
    assert (worker.engine, worker.index, worker.serve.drain_s) == (config.engine, config.index, 44.0)
    assert (door.index, door.router, door.engine.token_budget) == (config.index, config.router, 77)
    assert (door.engine.max_num_seqs, door.engine.ageing_s) == (config.engine.max_num_seqs, config.engine.ageing_s)
    for one in (worker, door):
        assert (one.engine.model, one.engine.cache.chunk_tokens, one.public_name) == ("a/b", 96, "a/b")
    named = config.model_copy(update={"served_model_name": "mine"})
    assert told_to_workers(named).public_name == told_to_front_doors(named).public_name == "mine"
