"""The configuration tree: sizes, bounds, unknown keys, and the public model name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cluster.config import CacheConfig, ClusterConfig, EngineConfig, IndexConfig, RouterConfig, ServeConfig, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2GiB", 2 * 2**30),
        ("512MiB", 512 * 2**20),
        ("24GB", 24 * 10**9),
        ("1kb", 1000),
        ("1KiB", 1024),
        ("1k", 1024),
        ("3m", 3 * 2**20),
        ("1.5g", 3 * 2**29),
        ("0.5 TiB", 2**39),
        ("2TB", 2 * 10**12),
        (" 7 ", 7),
        ("7b", 7),
        ("7B", 7),
        (7, 7),
        ("1.9", 1),
    ],
)
def test_sizes(text: object, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "2 GiB 3", "-1GiB", "1e9", "2XiB", "2Gi B", "1,5g", "0x10", "half", None, True, [], "."]
)
def test_what_is_no_size_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ValueError, match="2GiB"):
        parse_bytes(text)


def test_kv_memory_is_read_as_a_size() -> None:
    assert CacheConfig(kv_memory="512MiB").kv_memory == 2**29
    assert CacheConfig(kv_memory=None).kv_memory is None
    assert CacheConfig().kv_memory is None
    for wrong in (0, -5, "0", "lots"):
        with pytest.raises(ValidationError) as caught:
            CacheConfig(kv_memory=wrong)
        assert caught.value.errors()[0]["loc"][0] == "kv_memory"


@pytest.mark.parametrize(
    "wrong",
    [
        {"engin": {}},
        {"engine": {"modle": "demo"}},
        {"engine": {"cache": {"block_sise": 16}}},
        {"index": {"redis": "redis://x"}},
        {"router": {"weights": 1}},
        {"serve": {"ports": 1}},
    ],
    ids=str,
)
def test_unknown_keys_are_rejected_at_every_level(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ClusterConfig.model_validate(wrong)
    (problem,) = caught.value.errors()
    assert problem["type"] == "extra_forbidden"


@pytest.mark.parametrize(("block", "chunk"), [(16, 64), (16, 16), (1, 1), (1024, 65536), (48, 96)])
def test_a_chunk_is_whole_blocks(block: int, chunk: int) -> None:
    assert CacheConfig(block_size=block, chunk_tokens=chunk).chunk_tokens == chunk


@pytest.mark.parametrize(("block", "chunk"), [(16, 65), (16, 8), (48, None), (128, None)])
def test_a_chunk_that_cuts_a_block_names_the_option_and_both_numbers(block: int, chunk: int | None) -> None:
    values = {"block_size": block} if chunk is None else {"block_size": block, "chunk_tokens": chunk}
    with pytest.raises(ValidationError) as caught:
        CacheConfig.model_validate(values)
    (problem,) = caught.value.errors()
    assert problem["loc"] == ("chunk_tokens",)
    assert f"({chunk or 64})" in problem["msg"] and f"({block})" in problem["msg"]


OUT_OF_RANGE: list[tuple[type[Any], str, list[Any]]] = [
    (CacheConfig, "block_size", [0, -1, 1025, 1.5, "x"]),
    (CacheConfig, "chunk_tokens", [0, 131072]),
    (CacheConfig, "memory_share", [0.0, -0.1, 0.96, float("nan")]),
    (CacheConfig, "prefix_cache", ["on", "", None]),
    (EngineConfig, "dtype", ["float64", "fp32", ""]),
    (EngineConfig, "device", ["tpu", "cuda:0"]),
    (EngineConfig, "max_model_len", [0, -1]),
    (EngineConfig, "max_num_seqs", [0]),
    (EngineConfig, "token_budget", [0]),
    (EngineConfig, "max_queue", [0]),
    (EngineConfig, "threads", [0]),
    (EngineConfig, "world_size", [0, 2]),
    (IndexConfig, "key_prefix", ["", "a b", "a:b", "{a}", "x" * 65]),
    (IndexConfig, "heartbeat_s", [0, -1]),
    (IndexConfig, "publish_interval_s", [-0.1]),
    (IndexConfig, "stream_max_entries", [999]),
    (IndexConfig, "timeout_s", [0]),
    (RouterConfig, "policy", ["random", ""]),
    (RouterConfig, "replicas", [0]),
    (RouterConfig, "default_prefill_tokens_per_s", [0]),
    (RouterConfig, "near_tie", [-0.1, 1.1]),
    (ServeConfig, "port", [-1, 0, 65536]),
    (ServeConfig, "grpc_port", [-1, 0, 65536]),
    (ServeConfig, "replicas", [0, -2]),
    (ServeConfig, "cpus_per_replica", [-1]),
    (ServeConfig, "drain_s", [-1]),
    (ClusterConfig, "served_model_name", [""]),
]


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [(part, field, value) for part, field, values in OUT_OF_RANGE for value in values],
)
def test_values_out_of_range_name_their_field(part: type[Any], field: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        part.model_validate({field: value})
    assert {problem["loc"][0] for problem in caught.value.errors()} == {field}


def test_a_replica_outlives_one_lost_heartbeat() -> None:
    assert IndexConfig(heartbeat_s=1.0, heartbeat_ttl_s=2.0).heartbeat_ttl_s == 2.0
    with pytest.raises(ValidationError, match="twice"):
        IndexConfig(heartbeat_s=1.0, heartbeat_ttl_s=1.9)


def test_a_config_survives_being_dumped_and_read() -> None:
    config = ClusterConfig.model_validate(
        {
            "engine": {"model": "a/b", "dtype": "float32", "threads": 2, "cache": {"kv_memory": "2GiB"}},
            "index": {"redis_url": "redis://host:1/2", "heartbeat_s": 0.25},
            "router": {"policy": "round_robin"},
            "serve": {"port": 1, "replicas": 5},
            "served_model_name": "name",
        }
    )
    assert ClusterConfig.model_validate(config.model_dump()) == config
    assert ClusterConfig.model_validate_json(config.model_dump_json()) == config
    assert ClusterConfig.model_validate(ClusterConfig().model_dump()) == ClusterConfig()


def test_a_config_cannot_be_changed() -> None:
    config = ClusterConfig()
    for part, field, value in ((config.engine, "max_num_seqs", 1), (config, "serve", ServeConfig(port=1))):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, field, value)
    assert config == ClusterConfig()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "SmolLM2-135M-Instruct"),
        ("owner/model", "owner/model"),
        ("gpt2", "gpt2"),
        ("/models/tiny-llama", "tiny-llama"),
        ("/models/tiny-llama/", "tiny-llama"),
        ("./tiny", "tiny"),
        ("../models/tiny", "tiny"),
        ("~/models/tiny", "tiny"),
        ("demo2", "demo2"),
    ],
)
def test_public_name(model: str, name: str) -> None:
    engine = EngineConfig(model=model)
    assert ClusterConfig(engine=engine).public_name == name
    assert ClusterConfig(engine=engine, served_model_name="mine").public_name == "mine"


@pytest.mark.parametrize("model", [".", "./", "/"])
def test_public_name_is_never_empty(model: str) -> None:
    assert ClusterConfig(engine=EngineConfig(model=model)).public_name
