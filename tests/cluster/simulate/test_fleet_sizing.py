"""fleet_sizing: the search finds the fewest replicas from wherever it starts, and runs no size twice."""

from __future__ import annotations

import pytest

from cluster.simulate.fleet_report import FleetReport
from cluster.simulate.fleet_sizing import MOST_REPLICAS, smallest_fleet
from cluster.simulate.sim_report import Spread


def report(replicas: int, p90: float) -> FleetReport:
    return FleetReport(
        policy="p",
        requests=1,
        finished=1,
        shed=0,
        failed=0,
        hit_rate=0.5,
        ttft=Spread(1, p90 / 2, p90 / 2, p90, p90, p90),
        inter_token=None,
        hotspot=1.0,
        utilisation=0.5,
        preemptions=0,
        prefill_tokens=1,
        decisions_per_s=1.0,
        virtual_s=3600.0,
        gpu_hours=float(replicas),
        wall_s=0.0,
    )


@pytest.mark.parametrize("wanted", [1, 2, 3, 7, 8, 9, 100, MOST_REPLICAS])
@pytest.mark.parametrize("start", [0, 1, 2, 8, 50])
def test_the_fewest_that_keep_the_target(wanted: int, start: int) -> None:
    runs: list[int] = []

    def run(replicas: int) -> FleetReport:
        runs.append(replicas)
        return report(replicas, 10.0 * wanted / replicas)

    size = smallest_fleet("p", 10.0, run, start)
    assert (size.replicas, size.gpu_hours, size.policy) == (wanted, float(wanted), "p")
    assert size.ttft_p90_s is not None and size.ttft_p90_s <= 10.0
    assert len(runs) == len(set(runs)) <= 20


def test_a_target_that_no_fleet_keeps() -> None:
    size = smallest_fleet("p", 1.0, lambda replicas: report(replicas, 2.0), 8)
    assert (size.replicas, size.ttft_p90_s) == (None, 2.0)
