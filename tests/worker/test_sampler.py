"""Sampling against a slow per-row oracle, independence of rows, and the shape of the drawn distribution."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.sampling import SamplingParams
from worker.sampler import Sampler, uniform

SAMPLER = Sampler()
GOLDEN = [0.6524484863740322, 0.7012121095215252, 0.36818951565166946]  # uniform(0, 0), uniform(0, 1), uniform(1, 0)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def oracle(logits: list[float], params: SamplingParams, position: int) -> int:
    """One row in plain Python."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.greedy or params.top_k == 1:
        return ranked[0]
    top = logits[ranked[0]]
    mass = {token: math.exp((logits[token] - top) / params.temperature) for token in ranked}
    if params.top_k or params.top_p < 1.0:
        ranked = ranked[: params.top_k or len(ranked)]
        total, kept, ahead = sum(mass[token] for token in ranked), [], 0.0
        for token in ranked:
            if ahead >= params.top_p * total:
                break
            kept.append(token)
            ahead += mass[token]
        ranked = kept
    else:
        ranked = sorted(ranked)
    target, running = uniform(params.seed, position) * sum(mass[token] for token in ranked), 0.0
    for token in ranked:
        running += mass[token]
        if running > target:
            return token
    return ranked[-1]


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 2.5]),
        top_k=rng.choice([0, 0, 1, 3, 40, 10**6]),
        top_p=rng.choice([1.0, 1.0, 0.05, 0.5, 0.95]),
        seed=rng.randrange(-(2**63), 2**63),
    )


@pytest.mark.parametrize("vocab", [1, 7, 300, 3001])
def test_rows_equal_the_oracle_alone_and_in_company(vocab: int) -> None:
    rng = random.Random(vocab)
    torch.manual_seed(vocab)
    rows = 40
    logits = torch.randn(rows, vocab) * 3
    params = [random_params(rng) for _ in range(rows)]
    positions = [rng.randrange(1, 10_000) for _ in range(rows)]
    together = SAMPLER.sample(logits, params, positions)
    alone = [SAMPLER.sample(logits[r : r + 1], params[r : r + 1], positions[r : r + 1])[0] for r in range(rows)]
    assert together == alone
    assert together == [oracle(logits[r].tolist(), params[r], positions[r]) for r in range(rows)]


def test_flat_rows_that_need_the_whole_vocabulary_ranked() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 5000) * 0.01
    params = [SamplingParams(top_p=0.9, seed=s) for s in range(3)] + [
        SamplingParams(top_k=2000, seed=s) for s in range(3)
    ]
    assert SAMPLER.sample(logits, params, [5] * 6) == [oracle(logits[r].tolist(), params[r], 5) for r in range(6)]


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0]]).repeat(3, 1)
    greedy, one, tiny = SamplingParams(temperature=0.0), SamplingParams(top_k=1), SamplingParams(top_p=1e-9)
    assert SAMPLER.sample(logits, [greedy, one, tiny], [1, 1, 1]) == [1, 1, 1]


def test_extreme_temperatures_and_masked_logits() -> None:
    logits = torch.tensor([[0.0, 80.0, float("-inf"), 79.0]]).repeat(3, 1)
    cold, hot = SamplingParams(temperature=1e-300), SamplingParams(temperature=100.0, top_p=0.999)
    assert SAMPLER.sample(logits[:1], [cold], [9]) == [1]
    drawn = {SAMPLER.sample(logits[:1], [hot], [position])[0] for position in range(300)}
    assert drawn == {0, 1, 3}


def test_half_precision_logits() -> None:
    logits = torch.randn(4, 50).to(torch.bfloat16)
    params = [SamplingParams(seed=s, top_k=5) for s in range(4)]
    assert SAMPLER.sample(logits, params, [3] * 4) == SAMPLER.sample(logits.float(), params, [3] * 4)


@pytest.mark.parametrize("top_k", [0, 4])
def test_frequencies_follow_the_probabilities(top_k: int) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0])
    draws = 6000
    params = [SamplingParams(seed=11, top_k=top_k)] * draws
    counts = Counter(SAMPLER.sample(logits.repeat(draws, 1), params, range(1, draws + 1)))
    kept = top_k or len(logits)
    expected = torch.softmax(logits[:kept].double(), 0) * draws
    assert set(counts) <= set(range(kept))
    chi_square = sum((counts[token] - e) ** 2 / e for token, e in enumerate(expected.tolist()))
    assert chi_square < 22  # 5 degrees of freedom: p < 0.001


@settings(max_examples=200)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31))
def test_uniform_is_in_range_and_pure(seed: int, position: int) -> None:
    u = uniform(seed, position)
    assert 0.0 <= u < 1.0
    assert u == uniform(seed, position)


def test_uniform_golden_values_and_spread() -> None:
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0)] == GOLDEN
    by_position = [uniform(5, p) for p in range(4000)]
    by_seed = [uniform(s, 5) for s in range(4000)]
    for values in (by_position, by_seed):
        assert abs(sum(values) / len(values) - 0.5) < 0.02
        assert len(set(values)) == len(values)
        neighbours = sum((a - 0.5) * (b - 0.5) for a, b in pairwise(values)) / len(values)
        assert abs(neighbours) < 0.01
