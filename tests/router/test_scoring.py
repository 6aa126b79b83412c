"""Scoring: the policies on hand-made candidates."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cluster.core.replica import WorkerId
from cluster.core.step_time import StepTimeModel
from router.estimated_ttft import EstimatedTtft
from router.own_work import Work
from router.policies import create_policy
from router.scoring import Candidate, LeastUncached, Policy, RoundRobin


def candidate(name: str, **values: object) -> Candidate:
    return Candidate(worker_id=WorkerId(name), **values)  # type: ignore[arg-type]


def order(policy: Policy, prompt: int, *candidates: Candidate) -> list[str]:
    return [score.candidate.worker_id for score in policy.rank(prompt, candidates)]


@pytest.fixture
def ttft() -> EstimatedTtft:
    return EstimatedTtft(default_rate=1000.0, near_tie=0.05, rng=random.Random(1))


def test_the_holder_of_the_prefix_wins(ttft: EstimatedTtft) -> None:
    assert order(ttft, 1000, candidate("a"), candidate("b", overlap_tokens=960)) == ["b", "a"]


def test_a_busy_holder_loses_to_an_idle_stranger(ttft: EstimatedTtft) -> None:
    assert order(ttft, 1000, candidate("a"), candidate("b", overlap_tokens=960, others_tokens=3000)) == ["a", "b"]


def test_the_faster_replica_wins_at_equal_work(ttft: EstimatedTtft) -> None:
    slow, fast = candidate("a", prefill_tokens_per_s=500.0), candidate("b", prefill_tokens_per_s=1500.0)
    assert order(ttft, 1000, slow, fast) == ["b", "a"]


def test_an_unknown_rate_is_the_mean_of_the_known_ones(ttft: EstimatedTtft) -> None:
    """A new replica must not look faster or slower than the fleet only because it has not measured yet."""
    known = candidate("a", prefill_tokens_per_s=100.0)
    scores = {str(s.candidate.worker_id): s for s in ttft.rank(50, [known, candidate("b")])}
    assert scores["a"].own_s == scores["b"].own_s == pytest.approx(0.5)
    assert scores["a"].cost == scores["b"].cost


def test_near_ties_go_to_the_larger_overlap_then_to_fewer_running(ttft: EstimatedTtft) -> None:
    near = [candidate("a", others_tokens=0), candidate("b", overlap_tokens=64, others_tokens=80)]
    assert order(ttft, 1000, *near) == ["b", "a"]
    equal = [candidate("a", running=3), candidate("b", running=1)]
    assert order(ttft, 1000, *equal) == ["b", "a"]


def test_full_ties_are_spread(ttft: EstimatedTtft) -> None:
    first = Counter(order(ttft, 100, candidate("a"), candidate("b"))[0] for _ in range(200))
    assert min(first["a"], first["b"]) > 60


@pytest.mark.parametrize("policy", ["estimated_ttft", "least_uncached", "round_robin"])
def test_lost_replicas_come_last_and_everyone_is_ranked_once(policy: str) -> None:
    chosen = create_policy(policy, default_rate=1000.0, near_tie=0.05, rng=random.Random(0))
    group = [candidate("a", overlap_tokens=900, lost=True), candidate("b", ahead_tokens=9000), candidate("c")]
    for _ in range(6):
        ranked = order(chosen, 1000, *group)
        assert ranked[-1] == "a" and sorted(ranked) == ["a", "b", "c"]


def test_least_uncached_is_blind_to_overlap() -> None:
    policy = LeastUncached(random.Random(0))
    assert order(policy, 1000, candidate("a", overlap_tokens=999, ahead_tokens=10), candidate("b")) == ["b", "a"]


def test_round_robin_takes_turns() -> None:
    policy = RoundRobin()
    pair = (candidate("a"), candidate("b"))
    assert [order(policy, 1, *pair)[0] for _ in range(4)] == ["a", "b", "a", "b"]


def test_no_candidates_is_no_ranking(ttft: EstimatedTtft) -> None:
    assert ttft.rank(100, []) == []


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown routing policy"):
        create_policy("fastest", default_rate=1.0, near_tie=0.0, rng=random.Random(0))


def test_where_live_requests_fill_the_memory_the_wait_is_until_enough_of_them_have_ended(ttft: EstimatedTtft) -> None:
    full = Work(ahead_s=0.1, active_tokens=4000, decode_s=8.0)
    scores = ttft.rank(2000, [candidate("a", work=full, kv_tokens=5000), candidate("b", work=full, kv_tokens=6000)])
    assert [s.candidate.worker_id for s in scores] == ["b", "a"]
    assert scores[1].cost - scores[0].cost == pytest.approx(8.0 * 1000 / 4000 - 0.1)


def test_a_second_copy_of_a_hot_prefix_is_not_charged(ttft: EstimatedTtft) -> None:
    """At equal load the only holder and the next one are equals; then the one with less that runs is taken."""
    hot = {"hot_tokens": 960}
    assert order(ttft, 1000, candidate("a", overlap_tokens=960, running=2, **hot), candidate("b", **hot)) == ["b", "a"]
    assert order(ttft, 1000, candidate("a", overlap_tokens=960, running=2), candidate("b")) == ["a", "b"]


def test_the_step_time_model_counts_context_and_what_decodes_there(ttft: EstimatedTtft) -> None:
    model = StepTimeModel(0.01, 1e-4, 1e-6, 1e-3, 1e-6)
    busy = Work(decoding=10, decode_tokens=5000)
    (score,) = ttft.rank(3000, [candidate("a", overlap_tokens=0, step_time=model, work=busy)])
    assert score.own_s == pytest.approx(0.3 + 1e-6 * 3000 * 3001 / 2 + 2 * (0.01 + 0.01 + 0.005))
    (score,) = ttft.rank(3000, [candidate("a", overlap_tokens=2000, step_time=model)])
    assert score.own_s == pytest.approx(0.1 + 1e-6 * 1000 * (2000 + 1001 / 2) + 0.01)


def test_overtaking_costs_what_the_others_wait_longer(ttft: EstimatedTtft) -> None:
    quiet, full = candidate("a"), candidate("b", work=Work(overtaken=3))
    scores = ttft.rank(1000, [quiet, full])
    assert scores[1].cost - scores[0].cost == pytest.approx(3 * 1.0)
