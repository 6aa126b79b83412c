"""FastForward: whatever it jumps over, everything is as after plain steps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_world import ROUND_TIMES, chats, request

from cluster.simulate.engine_simulation import EngineSimulation, SimResult
from cluster.simulate.mooncake_trace import TraceRequest
from cluster.simulate.sim_report import spread
from cluster.simulate.sim_settings import SimSettings
from cluster.simulate.step_times import EXAMPLE


def both(
    trace: list[TraceRequest], *, engine: dict[str, Any] | None = None, **values: Any
) -> tuple[EngineSimulation, SimResult, EngineSimulation, SimResult]:
    given_values = {"block_size": 4, "num_blocks": 200, "step_time": ROUND_TIMES, **values}
    limits = {"token_budget": 64, **(engine or {})}
    fast = EngineSimulation(trace, SimSettings(engine=limits, **given_values))
    plain = EngineSimulation(trace, SimSettings(engine=limits, fast_forward=False, **given_values))
    return fast, fast.run(), plain, plain.run()


def assert_equal(fast: EngineSimulation, jumped: SimResult, plain: EngineSimulation, stepped: SimResult) -> None:
    assert stepped.fast_steps == 0
    assert (jumped.steps, jumped.prefill_tokens, jumped.preemptions, jumped.blocks) == (
        stepped.steps,
        stepped.prefill_tokens,
        stepped.preemptions,
        stepped.blocks,
    )
    assert jumped.virtual_s == stepped.virtual_s
    assert jumped.busy_s == stepped.busy_s
    assert jumped.log.duplicated_tokens == stepped.log.duplicated_tokens
    for name, record in stepped.log.records.items():
        other = jumped.log.records[name]
        for field in ("admitted_s", "first_token_s", "last_token_s", "finished_s", "cached_tokens", "refused"):
            assert getattr(other, field) == getattr(record, field), (name, field)
    assert spread(jumped.log.gaps, jumped.log.gap_counts) == spread(stepped.log.gaps, stepped.log.gap_counts)
    assert cache_of(fast) == cache_of(plain)
    fast.engine._manager.check_invariants()


def cache_of(simulation: EngineSimulation) -> list[tuple[bytes, list[int], int]]:
    """What the tree holds, with the blocks and the order in which they would be evicted."""
    tree = simulation.engine._manager._cache
    return sorted((bytes(node.packed), list(node.blocks), node.last_access) for node in tree.nodes())  # type: ignore[union-attr]


def test_a_lone_answer_is_one_jump() -> None:
    fast, jumped, plain, stepped = both([request(0, 0.0, 20, 100, 0, 1, 2)])
    assert_equal(fast, jumped, plain, stepped)
    assert jumped.fast_steps == 98  # all but the prefill and the step that ends the answer


def test_a_jump_ends_where_the_next_request_arrives() -> None:
    trace = [request(0, 0.0, 20, 100, 0, 1, 2), request(1, 30.0, 20, 5, 3, 4, 5)]
    fast, jumped, plain, stepped = both(trace)
    assert_equal(fast, jumped, plain, stepped)
    admitted = jumped.log.records["r1"].admitted_s
    assert admitted is not None and 30.0 <= admitted < 31.1


def test_a_jump_ends_where_memory_does() -> None:
    trace = [request(n, 0.0, 16, 60, 2 * n, 2 * n + 1) for n in range(4)]
    fast, jumped, plain, stepped = both(trace, num_blocks=30)
    assert_equal(fast, jumped, plain, stepped)
    assert jumped.preemptions > 0 and jumped.fast_steps > 0


def test_a_jump_evicts_in_the_same_order() -> None:
    """Earlier answers fill the cache; a long one pushes them out block by block while nothing else happens."""
    trace = [request(n, 100.0 * n, 16, 8, 2 * n, 2 * n + 1) for n in range(5)]
    trace += [request(5, 600.0, 16, 80, 20, 21), request(6, 800.0, 16, 2, 4, 5)]
    fast, jumped, plain, stepped = both(trace, num_blocks=32)
    assert_equal(fast, jumped, plain, stepped)
    assert jumped.fast_steps > 70


@pytest.mark.parametrize("prefix_cache", ["radix", "chunk", "off"])
def test_with_each_kind_of_cache(prefix_cache: str) -> None:
    cache = {"block_size": 4, "chunk_tokens": 8, "prefix_cache": prefix_cache}
    fast, jumped, _plain, stepped = both(chats(30, rate=0.1), num_blocks=60, engine={"cache": cache})
    assert jumped.fast_steps > 0
    assert jumped.virtual_s == stepped.virtual_s
    assert jumped.blocks == stepped.blocks
    assert [r.finished_s for r in jumped.log.records.values()] == [r.finished_s for r in stepped.log.records.values()]
    fast.engine._manager.check_invariants()


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    rate=st.sampled_from([0.02, 0.1, 0.5, 5.0]),
    num_blocks=st.integers(32, 120),
    block_size=st.sampled_from([1, 3, 4, 8]),
    max_num_seqs=st.integers(1, 8),
    token_budget=st.integers(1, 64),
)
def test_random_traces_end_the_same_way(
    seed: int, rate: float, num_blocks: int, block_size: int, max_num_seqs: int, token_budget: int
) -> None:
    trace = chats(25, seed=seed, rate=rate)
    limits = {"max_num_seqs": max_num_seqs, "token_budget": token_budget}
    assert_equal(*both(trace, engine=limits, num_blocks=num_blocks, block_size=block_size))


def test_with_times_that_are_no_round_numbers() -> None:
    fast, jumped, plain, stepped = both(chats(60, rate=50.0), step_time=EXAMPLE, num_blocks=80)
    assert_equal(fast, jumped, plain, stepped)
    assert jumped.fast_steps > 0
