"""FleetSimulation: policies on a small fleet: determinism, lag, deaths, slow replicas, bounds, real traces."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import ConfigError
from cluster.core.step_time import StepTimeModel
from cluster.simulate.fleet_load import speed_for_utilisation
from cluster.simulate.fleet_report import clairvoyant_bound, make_fleet_report
from cluster.simulate.fleet_simulation import Death, FleetResult, FleetSettings, FleetSimulation, Slowdown
from cluster.simulate.ideal_hits import ideal_block_hits, ideal_hits
from cluster.simulate.mooncake_trace import TRACE_BLOCK, TraceRequest, read_trace
from cluster.simulate.policy_lineup import LINEUP, chosen_policies
from cluster.simulate.scaled_replica import ReplicaSettings

TIMES = StepTimeModel(5e-3, 1e-4, 0.0, 1e-4, 0.0)
NAMES = [entry.name for entry in LINEUP]


def conversations(count: int, *, gap_s: float = 0.2, output: int = 20) -> list[TraceRequest]:
    """40 conversations in turns, each turn one block longer, behind one block that all share."""
    requests = []
    for number in range(count):
        turn, chat = divmod(number, 40)
        ids = (0, *(1000 * (chat + 1) + place for place in range(turn + 3)))
        requests.append(TraceRequest(number, number * gap_s, len(ids) * TRACE_BLOCK - 100, output, ids))
    return requests


def run(
    requests: list[TraceRequest], policy: str = "estimated_ttft", *, kv: int = 400_000, **fleet: Any
) -> FleetResult:
    settings = FleetSettings(**{"replicas": 4, "replica": ReplicaSettings(kv_tokens=kv, step_time=TIMES), **fleet})
    return FleetSimulation(requests, settings, chosen_policies(policy)[0], timer=lambda: 0.0).run()


@pytest.mark.parametrize("policy", NAMES)
def test_every_policy_serves_everything_and_gives_the_same_again(policy: str) -> None:
    requests = conversations(200)
    first, again = run(requests, policy), run(requests, policy)
    assert all(record.finished_s is not None for record in first.records.values())
    assert [r.ttft_s for r in first.records.values()] == [r.ttft_s for r in again.records.values()]
    report = make_fleet_report(policy, first, wall_s=0.0)
    assert report.ttft is not None and report.hit_rate is not None
    assert report.ttft.mean >= clairvoyant_bound(requests, ideal_hits(requests), 4, TIMES, 2048)
    assert 1.0 <= report.hotspot <= 4.0


def test_conversations_stay_where_they_are_cached() -> None:
    requests = conversations(400)
    ours, blind = (make_fleet_report(p, run(requests, p), wall_s=0.0) for p in ("estimated_ttft", "least_uncached"))
    assert ours.hit_rate is not None and blind.hit_rate is not None and ours.hit_rate > 0.6 > blind.hit_rate
    assert ours.ttft is not None and blind.ttft is not None and ours.ttft.mean < 0.7 * blind.ttft.mean


def test_late_events_cost_little_because_what_was_sent_is_known() -> None:
    requests = conversations(400)
    soon, late = (make_fleet_report("ours", run(requests, event_lag_s=lag), wall_s=0.0) for lag in (0.0, 0.2))
    assert soon.hit_rate is not None and late.hit_rate == pytest.approx(soon.hit_rate, abs=0.02)


def test_a_burst_with_one_new_prefix_stays_on_two_replicas() -> None:
    burst = [TraceRequest(n, 0.0, 8 * 512 + 64, 5, (*range(8), 100 + n)) for n in range(16)]
    result = run(burst, event_lag_s=0.2)
    assert len({record.replica for record in result.records.values()}) <= 2
    assert result.prefill_tokens <= 2 * 8 * 512 + 16 * 64


def test_a_replica_that_is_three_times_slower_is_relieved() -> None:
    """It says so in its heartbeats: of the first 20 requests it gets fewer than a fair share."""
    requests = [TraceRequest(n, n * 0.1, 4000, 5, tuple(range(8 * n, 8 * n + 8))) for n in range(60)]
    result = run(requests, slower=(3.0,))
    early = Counter(record.replica for record in list(result.records.values())[:20])
    late = Counter(record.replica for record in list(result.records.values())[20:])
    assert early[0] < 5 and late[0] <= 40 // 8


@pytest.mark.parametrize("gap_s", [0.2, 0.5, 1.0])
def test_a_replica_that_becomes_three_times_slower_is_relieved_before_its_heartbeats_say_so(gap_s: float) -> None:
    """Late first tokens tell: 20 requests later it gets hardly any, and after a while it is tried again."""
    requests = [TraceRequest(n, n * gap_s, 4000, 5, tuple(range(8 * n, 8 * n + 8))) for n in range(140)]
    result = run(requests, slowdown=Slowdown(replica=0, at_s=59.5 * gap_s, times=3.0))
    shares = [record.replica == 0 for record in result.records.values()]
    assert 12 <= sum(shares[:60]) <= 18
    assert sum(shares[60:80]) <= 3  # a fair share is 5
    assert 1 <= sum(shares[80:140]) <= 6  # 15


def test_a_dead_replica_loses_only_what_had_begun_to_answer() -> None:
    requests = conversations(300, gap_s=0.05, output=100)
    result = run(requests, death=Death(replica=1, at_s=5.0))
    failed = [record for record in result.records.values() if record.failed]
    assert failed and all(r.replica == 1 and r.first_token_s is not None and r.first_token_s <= 5.0 for r in failed)
    assert all(record.failed or record.finished_s is not None for record in result.records.values())
    assert not any(r.replica == 1 and r.request.arrival_s > 5.0 for r in result.records.values())


def test_wrong_settings_are_named() -> None:
    for wrong in ({"replicas": 0}, {"event_lag_s": -1.0}, {"death": Death(replica=7, at_s=1.0)}):
        with pytest.raises(ConfigError):
            run(conversations(1), **wrong)
    with pytest.raises(ConfigError, match="unknown policy 'fastest'"):
        chosen_policies("estimated_ttft,fastest")


def test_the_bound_by_hand() -> None:
    """Two at once on two replicas: alone 0.205 s each; pooled one is done at 0.1025 and the other at 0.205."""
    times = StepTimeModel(5e-3, 1e-4, 0.0, 0.0, 0.0)
    requests = [TraceRequest(n, 1.0, 2000, 1, tuple(range(4 * n, 4 * n + 4))) for n in range(2)]
    assert clairvoyant_bound(requests, ideal_hits(requests), 2, times, 2000) == pytest.approx(0.205)
    assert clairvoyant_bound(requests, ideal_hits(requests), 1, times, 2000) == pytest.approx((0.205 + 0.41) / 2)


def test_the_speed_for_a_utilisation_is_found() -> None:
    tried: list[float] = []

    def share(speed: float) -> float:
        tried.append(speed)
        return speed / (speed + 1)

    found = speed_for_utilisation(0.7, share)
    assert share(found) == pytest.approx(0.7, abs=0.02) and len(tried) <= 6


def test_the_conversation_trace_hits_as_published() -> None:
    """36.64 % of blocks in one infinite cache, the figure that Dynamo publishes."""
    root = os.environ.get("KVRAY_TRACES") or str(Path(__file__).parents[4] / "shared" / "traces")
    path = Path(root) / "mooncake" / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip("the Mooncake traces are not beside this tree (../shared/traces) nor at KVRAY_TRACES")
    assert round(ideal_block_hits(read_trace(path)), 4) == 0.3664
