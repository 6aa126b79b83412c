"""The speed at a load: from what a saturated replica finishes."""

from __future__ import annotations

import pytest
from sim_world import ROUND_TIMES, request

from cluster.core.errors import ConfigError
from cluster.simulate.engine_simulation import EngineSimulation
from cluster.simulate.load_search import capacity, speed_for
from cluster.simulate.sim_settings import SimSettings
from cluster.simulate.trace_variants import at_speed

SETTINGS = SimSettings(
    block_size=8, num_blocks=100, step_time=ROUND_TIMES, engine={"max_num_seqs": 1, "token_budget": 64}
)
# One at a time: a step of 1 + 0.08 s for the prompt, then four of 1.1 s.
SERVICE_S = 1.08 + 4 * 1.1
TRACE = [request(n, 2.0 * n, 8, 5, n) for n in range(200)]


def test_capacity_is_what_a_busy_replica_finishes() -> None:
    assert capacity(TRACE, SETTINGS) == pytest.approx(1 / SERVICE_S, rel=1e-3)


def test_a_replica_at_a_load_is_busy_for_that_share_when_requests_run_alone() -> None:
    speed = speed_for(0.8, TRACE, SETTINGS)
    assert speed == pytest.approx(0.8 / SERVICE_S * 2.0 * 199 / 200, rel=1e-3)
    result = EngineSimulation(at_speed(TRACE, speed), SETTINGS).run()
    assert result.busy_s / result.virtual_s == pytest.approx(0.8, abs=0.01)


def test_requests_at_one_moment_have_no_rate() -> None:
    with pytest.raises(ConfigError, match="--speed"):
        speed_for(0.8, [request(n, 5.0, 8, 5, n) for n in range(3)], SETTINGS)


def test_a_trace_that_never_fits_is_said_so() -> None:
    with pytest.raises(ConfigError, match="fits"):
        speed_for(0.8, [request(n, 1.0 * n, 4000, 5, *range(500)) for n in range(3)], SETTINGS)
