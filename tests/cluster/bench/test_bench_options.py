"""Every mistake in the options is one ConfigError line before anything starts, and exit code 2."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.bench.bench_options import read_options
from cluster.cli import app
from cluster.core.errors import ConfigError

GIVEN: dict[str, Any] = {
    "peer": ["a=http://127.0.0.1:8000", "b=https://example.org/v1"],
    "pid": [f"a={os.getpid()}"],
    "serve": False,
    "engine": False,
    "workloads": "W1,W3",
    "reps": 2,
    "time_limit": None,
    "background_load": None,
    "max_noise": 0.12,
    "quiet_wait": 1.0,
    "retries": 1,
    "json": None,
    "markdown": None,
    "png": None,
    "model": "demo",
    "dtype": "auto",
    "kv_memory": "2GiB",
    "threads": 2,
}


def test_good_options() -> None:
    options = read_options(GIVEN)
    assert options.peers == (("a", "http://127.0.0.1:8000"), ("b", "https://example.org/v1"))
    assert options.pids == {"a": os.getpid()}
    assert [workload.name for workload in options.workloads] == ["W1", "W3"]
    assert options.engine_config.cache.kv_memory == 2 * 2**30
    assert options.serve_options[:4] == ["--model", "demo", "--threads", "2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peer": ["a"]}, "--peer: 'a' is not NAME=URL"),
        ({"peer": ["a=127.0.0.1:8000"]}, "is no address"),
        ({"peer": ["a=http://x", "a=http://y"]}, "two peers are called 'a'"),
        ({"peer": ["kvray=http://x"], "serve": True}, "two peers are called 'kvray'"),
        ({"peer": None}, "nothing to run against"),
        ({"pid": ["c=1"]}, "no peer is called 'c'; there are: a, b"),
        ({"pid": ["a=x"]}, "'x' is no running process"),
        ({"pid": ["a=999999999"]}, "'999999999' is no running process"),
        ({"workloads": "W7"}, "no workload 'W7'"),
        ({"kv_memory": "much"}, "--kv-memory: 'much' is not a size"),
        ({"dtype": "int1"}, "--dtype"),
        ({"json": Path("/nowhere/at/all.json")}, "its folder does not exist"),
        ({"background_load": 1.5}, "no share of the CPU time"),
    ],
)
def test_mistakes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as failure:
        read_options(GIVEN | change)
    assert message in failure.value.message
    assert "\n" not in failure.value.message


@pytest.mark.parametrize("arguments", [["--engine", "--workloads", "W7"], [], ["--peer", "a"]])
def test_a_mistake_is_one_line_and_code_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("kvray: ")
