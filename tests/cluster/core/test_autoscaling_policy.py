"""AutoscalingPolicy: each rule on its own, and what must hold for any load."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_world import ScalingWorld, policy

from cluster.core.autoscaling_policy import Fleet
from cluster.core.replica_demand import ReplicaDemand


def steady(rate: float, **options: Any) -> ScalingWorld:
    return ScalingWorld(lambda t: rate, **options)


def test_enough_replicas_for_the_work_at_the_wanted_utilisation() -> None:
    world = steady(4.0, replicas=6, utilisation=0.5).run(400)
    assert world.target == 8, "four seconds of work per second, each replica half busy"
    assert steady(4.0, replicas=6, utilisation=0.8).run(400).target in (5, 6)


def test_overload_is_seen_through_the_queues_although_every_replica_is_only_fully_busy() -> None:
    world = steady(6.0, replicas=2, utilisation=0.75, ttft_target_s=1e3).run(60)
    assert world.target == 8


def test_a_queue_is_computed_within_the_target_by_at_most_twice_as_many() -> None:
    """The work alone needs 2; a burst is there, of which they have done 2 s when it is looked at."""
    wanted = {}
    for burst_s in (3.5, 20.0):

        def rate(t: float, burst_s: float = burst_s) -> float:
            return 1.0 + burst_s * (t == 60)

        world = ScalingWorld(rate, replicas=2, ttft_target_s=5.0, up_delay_s=0.0)
        wanted[burst_s] = world.run(60).target
    assert wanted == {3.5: 2, 20.0: 4}


def test_a_queue_that_those_who_start_will_have_computed_asks_for_nobody() -> None:
    """Two are busy all the time and 10 s wait; a third one that starts will have room for them."""
    wanted = {}
    for target in (2, 3):
        scaler = policy(start_s=100.0, ttft_target_s=1.0, up_delay_s=0.0, utilisation=0.9)
        for tick in range(60):
            fleet = dict.fromkeys("ab", ReplicaDemand(5.0, float(tick), 0.1, 0.1))
            wanted[target] = scaler.decide(float(tick), Fleet(fleet, target, 0.0))
    assert wanted == {2: 4, 3: 3}


@pytest.mark.parametrize(("share", "wanted"), [(0.2, 2), (0.8, 4), (0.95, 5)])
def test_memory_that_live_requests_fill_counts_like_work(share: float, wanted: int) -> None:
    """Reported by the 4 there are, whatever their number becomes: only the first decision counts."""
    world = steady(0.8, replicas=4, kv=lambda t: share, memory_use=0.8, utilisation=0.5)
    while world.target == 4 and world.now < 200:
        world.tick()
    assert world.target == wanted


def test_late_answers_buy_at_most_half_as_many_again() -> None:
    wanted = {
        share: steady(4.0, replicas=8, late=lambda t, share=share: share, utilisation=0.5).run(600).target
        for share in (0.05, 0.1, 0.14, 0.6)
    }
    assert wanted[0.05] == wanted[0.1] == 8
    assert 8 < wanted[0.14] < wanted[0.6] == 12


def test_replicas_that_are_hardly_busy_are_not_helped_by_more_of_them() -> None:
    """Long prompts are slow however many replicas there are."""
    world = steady(0.5, replicas=4, late=lambda t: 0.9, min_replicas=4).run(600)
    assert world.target == 4


def test_going_up_waits_for_its_delay_and_takes_the_least_of_it() -> None:
    world = ScalingWorld(lambda t: 1.0 if t <= 100 else 8.0, replicas=2, up_delay_s=20.0, ttft_target_s=1e3)
    world.run(119)
    assert world.target == 2
    world.run(60)
    assert world.target == 13


def test_one_short_peak_within_the_up_delay_changes_nothing() -> None:
    world = ScalingWorld(
        lambda t: 9.0 if 100 <= t < 103 else 1.0, replicas=3, up_delay_s=20.0, ttft_target_s=1e3, look_back_s=5.0
    )
    assert world.run(400).turns() == 0 and max(world.targets) == 3


def test_going_down_waits_for_its_delay_and_keeps_the_most_of_it() -> None:
    world = ScalingWorld(lambda t: 4.0 if t <= 300 else 1.0, replicas=7, down_delay_s=100.0, look_back_s=30.0)
    world.run(399)
    assert world.target == 7
    world.run(140)
    assert world.target == 2
    assert world.turns() == 0


def test_nobody_goes_before_those_who_were_asked_for_last_have_come() -> None:
    """The load is low again for far longer than the delay."""
    world = ScalingWorld(lambda t: 6.0 if 300 <= t < 360 else 1.0, replicas=2, start_s=300.0)
    world.policy = policy(start_s=300.0, look_back_s=20.0, down_delay_s=30.0, ttft_target_s=1e3)
    world.run(900)
    most = max(world.targets)
    asked_at = world.targets.index(most)
    assert most > 6 and asked_at < 400
    assert set(world.targets[asked_at : asked_at + 300]) == {most}
    assert world.targets[asked_at + 300] < most


def test_replicas_that_take_long_to_start_go_no_later_when_nobody_was_asked_for() -> None:
    fell = {}
    for start_s in (0.0, 600.0):
        world = ScalingWorld(lambda t: 4.0 if t <= 900 else 1.0, replicas=7, start_s=start_s)
        world.policy = policy(start_s=start_s, down_delay_s=100.0)
        world.run(1200)
        fell[start_s] = next(tick for tick, target in enumerate(world.targets) if target < 7)
    assert fell[0.0] == fell[600.0] < 1050


def test_a_load_between_two_numbers_of_replicas_keeps_the_larger() -> None:
    """Down only when 10 % more would still fit."""
    world = ScalingWorld(lambda t: 2.6 + 0.1 * math.sin(t / 40), replicas=4, utilisation=0.65).run(2000)
    assert set(world.targets[200:]) == {5}


def test_the_rate_is_that_of_the_look_back_window() -> None:
    short, long = (
        ScalingWorld(
            lambda t: 1.0 if t <= 300 else 4.0, replicas=2, look_back_s=window, up_delay_s=0.0, ttft_target_s=1e3
        ).run(330)
        for window in (20.0, 200.0)
    )
    assert short.target == 7 > long.target


def test_bounds_hold_whatever_is_wanted() -> None:
    assert steady(50.0, max_replicas=5).run(300).target == 5
    assert steady(0.0, replicas=6, min_replicas=3).run(900).target == 3
    assert policy(min_replicas=4).decide(0.0, Fleet({}, 1, 0.0)) == 4
    assert policy(max_replicas=4).decide(0.0, Fleet({}, 9, 0.0)) == 4


def test_what_still_starts_is_not_asked_for_again() -> None:
    world = ScalingWorld(lambda t: 1.0 if t < 60 else 6.0, replicas=2, start_s=300.0, ttft_target_s=1e3)
    world.run(330)
    assert world.running == 2 and world.target == 10
    world.run(120)
    assert world.running == world.target == 10
    assert world.turns() == 0


def test_growing_work_is_met_when_the_replicas_that_are_asked_for_are_ready() -> None:
    ramp = ScalingWorld(lambda t: 2.0 + max(t - 600, 0) * 0.01, replicas=4, start_s=120.0, utilisation=0.65)
    blind = ScalingWorld(lambda t: 2.0 + max(t - 600, 0) * 0.01, replicas=4, utilisation=0.65)
    ramp.policy = policy(start_s=120.0, utilisation=0.65)
    ramp.run(1000)
    blind.run(1000)
    assert ramp.target > blind.target
    assert ramp.running >= 9 == int((2.0 + 400 * 0.01) / 0.65)


def test_work_that_doubles_at_once_is_extrapolated_to_thrice_as_much_at_most() -> None:
    world = ScalingWorld(lambda t: 2.0 if t < 900 else 4.0, replicas=4, utilisation=0.5, ttft_target_s=1e3)
    world.policy = policy(start_s=300.0, utilisation=0.5, ttft_target_s=1e3)
    world.run(1200)
    assert 16 < max(world.targets) <= 24


@pytest.mark.parametrize("start_s", [0.0, 60.0, 300.0])
def test_a_ramp_up_and_down_turns_once(start_s: float) -> None:
    def rate(t: float) -> float:
        return 2.0 + 10.0 * max(0.0, 1.0 - abs(t - 1800.0) / 1200.0)

    world = ScalingWorld(rate, replicas=4, start_s=start_s)
    world.policy = policy(start_s=start_s)
    world.run(4000)
    assert max(world.targets) > 16 and world.target <= 4
    assert world.turns() == 1


def test_to_zero_after_its_delay_and_only_where_the_minimum_is_zero() -> None:
    def rate(t: float) -> float:
        return 1.0 if t < 100 else 0.0

    world = ScalingWorld(rate, replicas=1, min_replicas=0, to_zero_delay_s=200.0, down_delay_s=10.0)
    world.run(298)
    assert world.target == 1
    world.run(10)
    assert world.target == 0
    world.run(500)
    assert world.target == 0
    assert ScalingWorld(rate, replicas=2, min_replicas=1, to_zero_delay_s=0.0).run(900).target == 1


def test_a_request_that_nobody_takes_brings_the_first_replica_at_once() -> None:
    world = ScalingWorld(lambda t: 0.5 * (t == 900), replicas=1, min_replicas=0, to_zero_delay_s=50.0, start_s=60.0)
    world.run(899)
    before = world.target
    world.tick()
    assert (before, world.target, world.running) == (0, 1, 0)
    world.run(59)
    assert world.target == 1 and world.running == 0
    world.run(3)
    assert world.running == 1 and world.served == 0.5


def test_a_request_that_still_decodes_keeps_the_last_replica() -> None:
    scaler = policy(min_replicas=0, to_zero_delay_s=50.0, down_delay_s=10.0)
    busy = {"a": ReplicaDemand(0.0, 5.0, 0.1, 0.02)}
    assert [scaler.decide(float(t), Fleet(busy, 1, 0.0)) for t in range(500)] == [1] * 500
    idle = {"a": ReplicaDemand(0.0, 5.0)}
    assert scaler.decide(520.0, Fleet(idle, 1, 0.0)) == 1
    assert [scaler.decide(521.0 + t, Fleet(idle, 1, 0.0)) for t in range(60)][-1] == 0


def test_a_replica_that_tells_nothing_counts_like_the_others() -> None:
    world = steady(4.0, replicas=8, utilisation=0.5).run(200)
    world.silent = set(world.names[:3])
    world.run(600)
    assert world.target == 8


def test_without_any_news_everything_stays() -> None:
    world = steady(4.0, replicas=5, utilisation=0.8).run(200)
    before = world.target
    world.silent = set(world.names)
    world.run(3000)
    assert world.target == before


def test_silent_replicas_are_not_idle_ones() -> None:
    world = steady(0.0, replicas=1, min_replicas=0, to_zero_delay_s=50.0, down_delay_s=10.0)
    world.silent = set(world.names)
    assert world.run(1000).target == 1


@pytest.mark.parametrize(
    "lie",
    [{"queued_s": math.nan}, {"loaded_s": math.inf}, {"kv_share": 7.0}, {"queued_s": -1e9}, {"seat_share": 1e300}],
)
def test_absurd_numbers_are_no_news(lie: dict[str, float]) -> None:
    world = steady(4.0, replicas=8, utilisation=0.5).run(200)
    world.lies = {world.names[0]: lie}
    assert world.run(600).target == 8


def test_a_counter_that_begins_anew_is_no_work() -> None:
    """A replica's engine restarted under its old name."""
    scaler = policy(utilisation=0.5)
    loaded = [float(t % 300) for t in range(900)]
    wanted = [
        scaler.decide(float(t), Fleet({"a": ReplicaDemand(0.0, value * 0.4, 0.0, 0.1)}, 1, 0.0))
        for t, value in enumerate(loaded)
    ]
    assert set(wanted) == {1}


def test_it_looks_once_per_second_however_often_it_is_asked() -> None:
    class Counted(dict[str, ReplicaDemand | None]):
        looks = 0

        def items(self) -> Any:
            Counted.looks += 1
            return super().items()

    scaler, fleet = policy(), Fleet(Counted(a=ReplicaDemand(seat_share=0.1)), 1, 0.0)
    for tick in range(1000):
        scaler.decide(tick / 10, fleet)
    assert Counted.looks == 100


def test_memory_of_the_past_is_bounded() -> None:
    world = steady(1.0, replicas=2, look_back_s=20.0, down_delay_s=40.0)
    longest = max(len(world.run(1).policy._samples) + len(world.policy._most) for _ in range(1000))
    assert longest <= 2 * 42 + 1 + 41


@settings(max_examples=12, deadline=None)
@given(
    rate=st.floats(0.0, 6.0),
    replicas=st.integers(1, 10),
    utilisation=st.floats(0.2, 0.9),
    start_s=st.sampled_from([0.0, 30.0, 120.0]),
    bounds=st.tuples(st.integers(0, 4), st.integers(4, 12)),
)
def test_a_constant_load_ends_at_one_number_within_the_bounds(
    rate: float, replicas: int, utilisation: float, start_s: float, bounds: tuple[int, int]
) -> None:
    low, high = bounds
    world = ScalingWorld(
        lambda t: rate, replicas=replicas, start_s=start_s, min_replicas=low, max_replicas=high, utilisation=utilisation
    )
    world.policy = policy(start_s=start_s, min_replicas=low, max_replicas=high, utilisation=utilisation)
    world.run(800)
    assert all(low <= target <= high for target in world.targets)
    assert len(set(world.targets[500:])) == 1, "no flapping"
    needed = math.ceil(rate / utilisation - 1e-6)
    assert world.target >= min(needed, high)
    assert world.target <= max(needed * 1.1 + 2, low, 1)
    assert world.turns() <= 2


@settings(max_examples=25, deadline=None)
@given(
    numbers=st.lists(
        st.tuples(*(st.floats(allow_nan=True, allow_infinity=True) for _ in range(6))), min_size=1, max_size=40
    ),
    target=st.integers(0, 99),
)
def test_whatever_is_reported_the_answer_is_within_the_bounds(numbers: list[tuple[float, ...]], target: int) -> None:
    scaler = policy(min_replicas=2, max_replicas=7)
    for tick, values in enumerate(numbers):
        demand = ReplicaDemand.from_numbers(dict(zip(ReplicaDemand._fields, values, strict=True)))
        assert 2 <= scaler.decide(tick * 2.0, Fleet({"a": demand, "b": None}, target, 0.0)) <= 7
