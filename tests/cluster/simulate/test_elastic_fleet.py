"""ElasticFleet, its scalers and the daily load: who comes and goes, what is paid, and that Serve's is Serve's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import ray.serve.autoscaling_policy as serve_policy
from ray.serve.config import AutoscalingConfig as ServeConfigOfScaling

from cluster.config import AutoscalingConfig
from cluster.core.errors import ConfigError
from cluster.core.step_time import StepTimeModel
from cluster.simulate.daily_load import daily_load
from cluster.simulate.elastic_fleet import ElasticFleet, ElasticResult, FleetState, Scaler
from cluster.simulate.fleet_simulation import FleetSettings
from cluster.simulate.mooncake_trace import TRACE_BLOCK, TraceRequest
from cluster.simulate.policy_lineup import chosen_policies
from cluster.simulate.scaled_replica import ReplicaSettings
from cluster.simulate.scalers import FixedReplicas, KvrayScaler, ServeDefault, ServeSettings

TIMES = StepTimeModel(5e-3, 1e-4, 0.0, 1e-4, 0.0)


def requests(count: int, gap_s: float, *, output: int = 20) -> list[TraceRequest]:
    return [TraceRequest(n, n * gap_s, 4 * TRACE_BLOCK, output, tuple(range(4 * n, 4 * n + 4))) for n in range(count)]


@dataclass
class Planned:
    """From these times on, so many replicas."""

    plan: Sequence[tuple[float, int]]

    def decide(self, now: float, state: FleetState) -> int:
        return [count for at_s, count in self.plan if at_s <= now][-1]


def run(load: list[TraceRequest], scaler: Scaler, *, first: int = 1, start_s: float = 10.0) -> ElasticResult:
    settings = FleetSettings(replicas=first, replica=ReplicaSettings(kv_tokens=100_000, step_time=TIMES))
    return ElasticFleet(load, settings, chosen_policies("estimated_ttft")[0], scaler, start_s=start_s).run_elastic()


def test_replicas_are_paid_from_being_asked_for_until_their_last_answer() -> None:
    result = run(requests(200, 0.3), Planned([(0.0, 1), (10.0, 3), (40.0, 1)]))
    assert [(one.at_s, one.serving, one.starting) for one in result.census[:3]] == [
        (0.0, 1, 0),
        (10.0, 1, 2),
        (20.0, 2, 1),
    ]
    assert result.paid_s == pytest.approx(result.fleet.virtual_s + 2 * 30.0, abs=2.0)
    assert result.turns == 1
    assert all(record.finished_s is not None for record in result.fleet.records.values())


def test_nobody_is_cut_off_when_replicas_go() -> None:
    result = run(requests(100, 0.05, output=400), Planned([(0.0, 4), (2.0, 1)]), first=4)
    records = result.fleet.records.values()
    assert all(record.finished_s is not None and not record.failed for record in records)
    assert len({record.replica for record in records}) == 4
    assert len({record.replica for record in records if record.request.arrival_s > 3.0}) == 1


def test_one_that_still_starts_is_given_up_first() -> None:
    result = run(requests(100, 0.3), Planned([(0.0, 1), (5.0, 2), (8.0, 1)]))
    assert {one.serving for one in result.census} == {1}
    assert result.paid_s == pytest.approx(result.fleet.virtual_s + 3.0, abs=0.1)


def test_with_nobody_requests_wait_for_the_first_replica() -> None:
    config = AutoscalingConfig(min_replicas=0, max_replicas=4, start_s=30, to_zero_delay_s=20, down_delay_s=5)
    early, late = requests(20, 0.5), requests(20, 0.5)
    load = early + [r._replace(number=r.number + 20, arrival_s=r.arrival_s + 200.0) for r in late]
    result = run(load, KvrayScaler(config.parameters()), start_s=30.0)
    assert 0 in {one.serving for one in result.census}
    times = [record.ttft_s for record in result.fleet.records.values()]
    assert all(ttft_s is not None for ttft_s in times)
    assert 30.0 < max(ttft_s for ttft_s in times if ttft_s is not None) < 40.0


def test_the_same_again_gives_the_same() -> None:
    config = AutoscalingConfig(max_replicas=8, look_back_s=10, start_s=10, down_delay_s=20)
    first, again = (run(requests(300, 0.1), KvrayScaler(config.parameters())) for _ in range(2))
    assert first.targets == again.targets and first.paid_s == again.paid_s
    assert max(count for _, count in first.targets) > 1


def test_a_fixed_fleet_never_changes() -> None:
    result = run(requests(50, 0.3), FixedReplicas(2), first=2)
    assert len(result.census) == 1 and result.paid_s == pytest.approx(2 * result.fleet.virtual_s)


@pytest.mark.parametrize("seed", range(6))
def test_serves_policy_decides_as_serve_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "min_replicas": 1,
        "max_replicas": 12,
        "target_ongoing_requests": rng.choice([2.0, 5.0]),
        "upscaling_factor": rng.choice([1.0, 0.6]),
        "downscaling_factor": rng.choice([1.0, 0.3]),
        "upscale_delay_s": 30.0,
        "downscale_delay_s": rng.choice([60.0, 600.0]),
    }
    ours = ServeDefault(ServeSettings(**options))
    config = ServeConfigOfScaling(**options)
    policy = serve_policy._apply_autoscaling_config(serve_policy._core_replica_queue_length_policy)
    now, target, state, ongoing, changes = 0.0, 3, dict[str, Any](), 10, 0
    monkeypatch.setattr(serve_policy.time, "time", lambda: now)
    for tick in range(3000):
        now = float(tick)
        ongoing = max(0, ongoing + rng.choice([-2, -1, 0, 0, 1, 2])) if tick % 700 else rng.randrange(60)
        decided = ours.decide(now, FleetState(dict.fromkeys(map(str, range(target)), None), target, 0, ongoing))  # type: ignore[arg-type]
        context = SimpleNamespace(
            current_num_replicas=target,
            target_num_replicas=target,
            total_num_requests=ours.total(now),
            config=config,
            policy_state=state,
        )
        theirs, state = policy(context)
        assert decided == min(max(theirs, 1), 12), tick
        changes += decided != target
        target = decided
    assert changes


def test_a_day_has_its_quiet_time_in_the_middle_and_keeps_every_request() -> None:
    load = daily_load(requests(1000, 1.0), copies=3, duration_s=3600.0, swing=8.0)
    assert len(load) == 3000 and [r.number for r in load] == list(range(3000))
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(load))
    tenths = [sum(360.0 * n <= r.arrival_s < 360.0 * (n + 1) for r in load) for n in range(10)]
    assert sum(tenths) == 3000
    assert 5 < tenths[0] / min(tenths[4:6]) < 9 and 0.8 < tenths[0] / tenths[9] < 1.25


def test_copies_share_the_first_block_and_nothing_else() -> None:
    base = [r._replace(hash_ids=(0, *(1 + i for i in r.hash_ids[1:]))) for r in requests(20, 1.0)]
    load = daily_load(base, copies=2, duration_s=100.0, swing=1.0)
    assert {r.hash_ids[0] for r in load} == {0}
    own = [i for r in load for i in r.hash_ids[1:]]
    assert len(own) == len(set(own)) == 2 * 20 * 3


@pytest.mark.parametrize("wrong", [{"copies": 0}, {"duration_s": 0.0}, {"swing": 0.5}])
def test_impossible_days_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        daily_load(requests(3, 1.0), **{"copies": 1, "duration_s": 10.0, "swing": 2.0, **wrong})
