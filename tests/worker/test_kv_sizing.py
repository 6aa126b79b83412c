"""From bytes to blocks, and what is said when the longest request does not fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.byte_size import format_bytes
from cluster.core.errors import ConfigError
from worker.kv_sizing import KvRequest, account_text, available_memory, container_memory, plan_kv

MIB = 2**20


def request(**changes: Any) -> KvRequest:
    values: dict[str, Any] = {
        "bytes_per_token": 1024,
        "block_size": 16,
        "free_bytes": 100 * MIB,
        "kv_memory": None,
        "memory_share": 0.25,
        "model_limit": 2048,
        "max_model_len": None,
    }
    return KvRequest(**{**values, **changes})


def test_share_of_free_memory() -> None:
    plan = plan_kv(request())
    assert plan.num_blocks == 25 * MIB // (16 * 1024) == 1600
    assert (plan.max_model_len, plan.warning) == (2048, None)
    assert plan.num_tokens == 25_600
    assert plan.num_bytes == 25 * MIB
    assert plan.full_length_requests == 12


def test_budget_in_bytes_beats_the_share() -> None:
    assert plan_kv(request(kv_memory=4 * MIB)).num_blocks == 256


def test_budget_over_free_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_memory is 101\.0 MiB, but only 100\.0 MiB are free"):
        plan_kv(request(kv_memory=101 * MIB))


def test_explicit_length_that_does_not_fit_says_need_and_longest() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_kv(request(kv_memory=MIB, max_model_len=1500))
    assert "1500 tokens needs 1.5 MiB" in caught.value.message
    assert caught.value.message.endswith("--max-model-len 1024")
    assert plan_kv(request(kv_memory=MIB, max_model_len=1024)).max_model_len == 1024


def test_default_length_shrinks_with_a_warning() -> None:
    plan = plan_kv(request(kv_memory=MIB))
    assert plan.max_model_len == 1024
    assert plan.warning is not None
    assert "needs 2.0 MiB" in plan.warning
    assert "lowered to 1024" in plan.warning


def test_length_over_the_models_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="own limit of 2048"):
        plan_kv(request(max_model_len=2049))


def test_less_than_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="less than one block"):
        plan_kv(request(kv_memory=1024))


@given(
    budget=st.integers(1, 10**9),
    per_token=st.integers(1, 10**5),
    block_size=st.integers(1, 1024),
    limit=st.integers(1, 10**6),
    explicit=st.booleans(),
)
def test_a_plan_holds_its_longest_request(
    budget: int, per_token: int, block_size: int, limit: int, explicit: bool
) -> None:
    asked = request(
        bytes_per_token=per_token,
        block_size=block_size,
        kv_memory=budget,
        free_bytes=10**9,
        model_limit=limit,
        max_model_len=limit if explicit else None,
    )
    try:
        plan = plan_kv(asked)
    except ConfigError:
        return
    assert 1 <= plan.max_model_len <= min(limit, plan.num_tokens)
    assert plan.full_length_requests >= 1
    assert plan.num_bytes <= budget
    assert plan.max_model_len == limit or (plan.warning is not None and not explicit)


def test_account_names_every_number() -> None:
    text = account_text(plan_kv(request()), weight_bytes=3 * MIB, weights_dtype="bfloat16")
    for part in ("3.0 MiB (bfloat16)", "1,024 bytes", "1,600 blocks of 16", "25,600", "2,048 tokens", "12 requests"):
        assert part in text


def test_memory_files() -> None:
    assert available_memory("MemTotal: 9 kB\nMemAvailable:   24089440 kB\n") == 24089440 * 1024
    with pytest.raises(ConfigError, match="MemAvailable"):
        available_memory("MemTotal: 9 kB\n")
    assert container_memory("1000\n", "400\n", "anon 1\ninactive_file 100\n") == 700
    assert container_memory("1000\n", "4000\n", "") == 0
    assert container_memory("max\n", "4000\n", "") > 2**60


def test_format_bytes() -> None:
    sizes = (5, 2048, 3 * MIB, 2**30, 2**41)
    assert [format_bytes(size) for size in sizes] == ["5 B", "2.0 KiB", "3.0 MiB", "1.0 GiB", "2.0 TiB"]
