"""ReplicaPace: who takes longer than it says is found soon, noise and common errors are not, and nothing lasts."""

from __future__ import annotations

import random

import pytest

from cluster.core.replica import WorkerId
from cluster.core.step_time import StepTimeModel
from router.own_work import OwnWork
from router.replica_pace import HALF_LIFE_S, MOST, SLOWER, ReplicaPace

A, B, C = (WorkerId(name) for name in "abc")


def after(answers: int, times: float, *, others: float = 1.0) -> float:
    """What is said of A after so many answers of each replica, A's `times` as long as estimated."""
    pace = ReplicaPace()
    for number in range(answers):
        for worker_id, factor in ((A, times), (B, others), (C, others)):
            pace.answered(worker_id, 0.5, 0.5 * factor, float(number))
    assert pace.of(B, float(answers)) == pace.of(C, float(answers)) == 1.0
    return pace.of(A, float(answers))


def test_three_times_as_long_is_found_after_two_answers_and_nearly_right_after_five() -> None:
    assert after(1, 3.0) == 1.0
    assert 2.0 < after(2, 3.0) < 3.0
    assert after(5, 3.0) == pytest.approx(2.5, abs=0.2)
    assert after(50, 1000.0) == MOST


def test_what_all_replicas_take_longer_is_the_estimates_own_error() -> None:
    assert after(20, 2.5, others=2.5) == 1.0
    assert after(20, 6.0, others=2.0) == pytest.approx(3.0, abs=0.4)
    assert after(20, 1.0, others=0.3) == 1.0  # the others are faster than they say: nobody is slow


def test_ordinary_noise_is_not_a_slow_replica() -> None:
    rng, pace = random.Random(1), ReplicaPace()
    for number in range(2000):
        for worker_id in (A, B, C):
            expected = rng.uniform(0.02, 1.0)
            observed = expected * rng.uniform(0.6, 1.7) + rng.uniform(0.0, 0.01)
            pace.answered(worker_id, expected, observed, number * 0.3)
            assert pace.of(worker_id, number * 0.3) == 1.0


def test_without_news_everybody_is_tried_again() -> None:
    pace = ReplicaPace()
    for number in range(5):
        pace.answered(A, 0.5, 2.5, float(number))
        pace.answered(B, 0.5, 0.5, float(number))
    assert pace.of(A, 4.0) > 3.0
    assert SLOWER <= pace.of(A, 4.0 + HALF_LIFE_S) < pace.of(A, 4.0) + 1e-9
    assert pace.of(A, 4.0 + 5 * HALF_LIFE_S) == 1.0


def test_nothing_is_kept_of_whoever_is_gone() -> None:
    pace = ReplicaPace()
    for number in range(5):
        pace.answered(A, 0.5, 5.0, float(number))
    pace.forget(A)
    pace.forget(B)
    assert pace.of(A, 5.0) == 1.0
    pace.answered(B, 0.5, 2.0, 5.0)
    assert pace.of(B, 5.0) > SLOWER  # A's slowness is not the common error


def test_nothing_is_learnt_from_work_without_an_estimate() -> None:
    pace = ReplicaPace()
    pace.answered(A, 0.0, 9.0, 1.0)
    assert pace.of(A, 1.0) == pace.of(A, 2.0, 9.0, 1.0) == 1.0


def slow_work(cached_tokens: int | None) -> OwnWork:
    """A takes three times as long as booked for prompts of 100 tokens, 50 of which are expected in its cache."""
    work = OwnWork()
    for number in range(6):
        work.book(f"a{number}", A, 1.0, 100, 50, now=3.0 * number)
        work.book(f"b{number}", B, 1.0, 100, 50, now=3.0 * number)
        work.answered(f"b{number}", 3.0 * number + 1.0, 50)
        work.answered(f"a{number}", 3.0 * number + 3.0, cached_tokens)
    return work


def test_own_work_measures_from_one_first_token_to_the_next() -> None:
    work = slow_work(50)
    pace = work.pace(A, 18.0)
    assert 2.0 < pace < 3.0 and work.pace(B, 18.0) == 1.0
    work.book("next", A, pace * 1.0, 100, 50, now=18.0)
    work.book("after", A, pace * 1.0, 100, 50, now=18.0)
    assert work.look(A, 0, now=18.5).ahead_s == pytest.approx(2 * pace - 0.5)
    work.end_life(A)
    assert work.pace(A, 18.0) == 1.0


@pytest.mark.parametrize("cached_tokens", [None, 10])
def test_what_was_not_computed_or_not_cached_says_nothing(cached_tokens: int | None) -> None:
    assert slow_work(cached_tokens).pace(A, 18.0) == 1.0


def test_a_prompt_that_is_late_counts_before_it_is_done() -> None:
    work = OwnWork()
    for number in range(3):
        for worker_id in (A, B):
            work.book(f"{worker_id}{number}", worker_id, 1.0, 100, 0, now=float(number))
            work.answered(f"{worker_id}{number}", number + 1.0, 0)
    work.book("late", A, 1.0, 100, 0, now=3.0)
    assert work.pace(A, 4.5) == 1.0
    assert work.pace(A, 3.0 + 8.0) > SLOWER


def test_a_slowed_model_takes_so_many_times_as_long() -> None:
    assert StepTimeModel(1.0, 2.0, 0.0, 0.5, 0.25).slowed(2.0) == StepTimeModel(2.0, 4.0, 0.0, 1.0, 0.5)
