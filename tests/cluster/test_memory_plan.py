"""From a shape and a memory size to blocks and requests; what is missing when it does not fit, and what is enough."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import CacheConfig, parse_bytes
from cluster.core.errors import ConfigError
from cluster.memory_plan import Concurrency, MemoryPlan, Weights, plan_memory, weights_dtype
from cluster.model_shape import ModelShape

GIB = 2**30
# Llama-3-8B's
PARAMETERS = 8_030_261_248
WEIGHT_BYTES = 2 * PARAMETERS
PER_TOKEN = 131_072


def shape(**changes: Any) -> ModelShape:
    values: dict[str, Any] = {
        "model_type": "llama",
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "model_limit": 8192,
        "dtype": "bfloat16",
        "parameters": PARAMETERS,
    }
    return ModelShape(**{**values, **changes})


def plan(
    memory: int, *, dtype: str = "bfloat16", length: int | None = None, of: ModelShape | None = None, **cache: Any
) -> MemoryPlan:
    weights = Weights(parameters=PARAMETERS, dtype=dtype, source="formula")
    config = CacheConfig(**{"chunk_tokens": cache.get("block_size", 16), **cache})
    return plan_memory(of or shape(), weights, config, memory_bytes=memory, max_model_len=length)


def test_memory_is_weights_and_pool_and_the_rest() -> None:
    made = plan(WEIGHT_BYTES + 8 * GIB, memory_share=0.5)
    assert made.kv.bytes_per_token == PER_TOKEN
    assert made.kv.num_blocks == 4 * GIB // (16 * PER_TOKEN) == 2048
    assert made.kv.num_tokens == 32_768
    assert (made.kv.max_model_len, made.kv.full_length_requests, made.missing_bytes) == (8192, 4, 0)
    assert made.left_bytes == 4 * GIB
    assert made.weights.num_bytes + made.kv.num_bytes + made.left_bytes == made.memory_bytes


def test_mha_needs_the_heads_over_the_kv_heads_as_much() -> None:
    made = plan(WEIGHT_BYTES + 8 * GIB)
    assert made.mha_bytes_per_token == 4 * PER_TOKEN == 2 * 32 * 32 * 128 * 2
    same = plan(WEIGHT_BYTES + 80 * GIB, of=shape(num_kv_heads=32))
    assert same.mha_bytes_per_token == same.kv.bytes_per_token


def test_float32_doubles_weights_and_kv() -> None:
    made = plan(80 * GIB, dtype="float32")
    assert made.weights.num_bytes == 2 * WEIGHT_BYTES
    assert made.kv.bytes_per_token == 2 * PER_TOKEN


def test_paging_against_reserving_the_longest() -> None:
    """32 requests of 4,096 tokens fill 16 GiB (the article's sum); reserving 8,192 for each halves them."""
    made = plan(WEIGHT_BYTES + 20 * GIB, kv_memory=16 * GIB)
    assert made.concurrency == (
        Concurrency(tokens=1024, paged=128, contiguous=16, reserved_use=0.125),
        Concurrency(tokens=4096, paged=32, contiguous=16, reserved_use=0.5),
        Concurrency(tokens=8192, paged=16, contiguous=16, reserved_use=1.0),
    )


def test_only_lengths_that_may_be_asked_for_are_listed() -> None:
    assert [row.tokens for row in plan(30 * GIB, length=2000).concurrency] == [1024, 2000]
    assert [row.tokens for row in plan(30 * GIB, length=1024).concurrency] == [1024]


def test_a_last_block_that_is_not_full_counts_as_one() -> None:
    made = plan(WEIGHT_BYTES + GIB, kv_memory=8192 * PER_TOKEN, block_size=1024, length=1025)
    assert made.concurrency[-1] == Concurrency(tokens=1025, paged=4, contiguous=7, reserved_use=1.0)


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"weights need 15\.0 GiB in bfloat16.* 14\.0 GiB; 980\.5 MiB missing; --mem"):
        plan(14 * GIB)


def test_a_length_that_was_asked_for_and_does_not_fit() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(WEIGHT_BYTES + 2 * GIB, length=8192)
    for words in ("8192 tokens needs 1.0 GiB", "--max-model-len 4096", "512.0 MiB missing", "--memory 19413MiB"):
        assert words in caught.value.message
    with pytest.raises(ConfigError, match=r"--max-model-len 4096; 512\.0 MiB missing$"):
        plan(WEIGHT_BYTES + 2 * GIB, kv_memory=GIB // 2, length=8192)


def test_the_models_own_length_is_lowered_and_says_so() -> None:
    made = plan(WEIGHT_BYTES + 2 * GIB)
    assert (made.kv.max_model_len, made.missing_bytes) == (4096, GIB // 2)
    assert made.kv.warning is not None
    assert made.shortfall.startswith("512.0 MiB missing; --memory 19413MiB")


@pytest.mark.parametrize(
    ("memory", "options", "words"),
    [
        (WEIGHT_BYTES, {}, "less than one block"),
        (WEIGHT_BYTES + GIB, {"kv_memory": 2 * GIB}, r"are free; 1\.0 GiB missing$"),
        (80 * GIB, {"length": 8193}, "own limit of 8192 tokens$"),
        (1, {"length": 8193}, r"missing$"),
    ],
)
def test_impossible(memory: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(memory, **options)


@given(
    memory=st.integers(1, 40 * GIB),
    share=st.floats(0.001, 0.95),
    block_size=st.integers(1, 1024),
    length=st.integers(1, 8192),
)
def test_the_memory_that_is_advised_is_enough(memory: int, share: float, block_size: int, length: int) -> None:
    options: dict[str, Any] = {"memory_share": share, "block_size": block_size, "length": length}
    try:
        plan(memory, **options)
    except ConfigError as error:
        advice = re.search(r"--memory (\w+) is enough", error.message)
        assert advice is not None
        assert plan(parse_bytes(advice[1]), **options).kv.max_model_len == length


def test_dtype() -> None:
    assert weights_dtype("auto", shape()) == "bfloat16"
    assert weights_dtype("auto", shape(dtype=None)) == "float32"
    assert weights_dtype("float16", shape(dtype="float8_e4m3fn")) == "float16"
    with pytest.raises(ConfigError, match="'float8_e4m3fn' cannot be served; choose --dtype float32"):
        weights_dtype("auto", shape(dtype="float8_e4m3fn"))
