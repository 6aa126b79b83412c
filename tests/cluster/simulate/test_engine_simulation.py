"""EngineSimulation: times by hand, arrivals, refusals, determinism."""

from __future__ import annotations

from typing import Any

import pytest
from sim_world import ROUND_TIMES, chats, request, simulate

from cluster.core.errors import ConfigError
from cluster.simulate.engine_simulation import EngineSimulation
from cluster.simulate.sim_report import make_report
from cluster.simulate.sim_settings import SimSettings
from cluster.simulate.trace_variants import shared_burst


def test_one_request_takes_the_time_of_its_steps() -> None:
    result = simulate([request(0, 5.0, 20, 3, 0, 1, 2)])
    record = result.log.records["r0"]
    assert record.admitted_s == 5.0
    assert record.first_token_s == pytest.approx(5.0 + 1.0 + 0.2)
    assert record.finished_s == pytest.approx(6.2 + 2 * 1.1)
    assert (result.steps, result.prefill_tokens) == (3, 20)
    assert result.busy_s == pytest.approx(3.4)
    assert result.virtual_s == record.finished_s


def test_a_long_prompt_goes_in_pieces_of_the_budget() -> None:
    result = simulate([request(0, 0.0, 100, 1, *range(13))], engine={"token_budget": 30})
    assert result.steps == 4
    assert result.log.records["r0"].first_token_s == pytest.approx(4.0 + 1.0)


def test_who_arrives_during_a_step_comes_into_the_next_one() -> None:
    result = simulate([request(0, 0.0, 20, 9, 0, 1, 2), request(1, 0.5, 20, 1, 3, 4, 5)])
    assert result.log.records["r1"].admitted_s == result.log.records["r0"].first_token_s


def test_an_idle_replica_is_not_busy() -> None:
    result = simulate([request(0, 0.0, 8, 1, 0), request(1, 100.0, 8, 1, 1)])
    assert result.virtual_s == pytest.approx(101.08)
    assert result.busy_s == pytest.approx(2.16)


def test_a_second_turn_finds_the_first() -> None:
    result = simulate([request(0, 0.0, 24, 2, 0, 1, 2), request(1, 50.0, 36, 2, 0, 1, 2, 3, 4)])
    assert result.log.records["r0"].cached_tokens == 0
    assert result.log.records["r1"].cached_tokens == 24
    assert result.prefill_tokens == 24 + 12


def test_what_can_never_fit_is_refused_and_the_others_finish() -> None:
    result = simulate([request(0, 0.0, 900, 2, *range(113)), request(1, 0.0, 8, 2, 0)])
    assert result.log.records["r0"].refused and not result.log.records["r0"].expired
    assert result.log.records["r1"].finished_s is not None


def test_a_trace_whose_requests_are_all_refused_ends() -> None:
    trace = [request(0, 1.0, 900, 2, *range(113))]
    result = simulate(trace)
    report = make_report(trace, result, speed=1.0, wall_s=0.0)
    assert (report.refused, report.finished, report.ttft, report.hit_rate) == (1, 0, None, None)


def test_a_small_pool_preempts_and_everybody_still_finishes() -> None:
    result = simulate(chats(40, rate=20.0), num_blocks=40)
    assert result.preemptions > 0
    assert all(record.finished_s is not None for record in result.log.records.values())
    assert result.blocks.in_use == 0


def test_equal_inputs_give_equal_reports_bit_for_bit() -> None:
    trace = chats(60, rate=2.0)

    def report() -> dict[str, object]:
        return make_report(trace, simulate(trace, num_blocks=60), speed=1.0, wall_s=0.0).to_json()

    assert report() == report()


def test_a_backlog_keeps_some_waiting_whatever_their_times() -> None:
    trace = [request(n, 1000.0 * n, 8, 5, 2 * n) for n in range(20)]
    settings = SimSettings(
        block_size=4, num_blocks=200, step_time=ROUND_TIMES, engine={"token_budget": 64, "max_num_seqs": 2}
    )
    result = EngineSimulation(trace, settings, backlog=4).run()
    assert sum(record.finished_s is not None for record in result.log.records.values()) == 20
    assert result.busy_s == pytest.approx(result.virtual_s)


@pytest.mark.parametrize("hold_back", [True, False])
def test_a_burst_behind_one_new_prefix_computes_it_once_only_when_held_back(hold_back: bool) -> None:
    trace = shared_burst(4, prefix_tokens=96, tail_tokens=8, output_tokens=2)
    result = simulate(trace, engine={"hold_back": hold_back, "token_budget": 512})
    assert result.log.duplicated_tokens == (0 if hold_back else 3 * 96)
    assert result.prefill_tokens == 104 + 3 * 8 + result.log.duplicated_tokens


@pytest.mark.parametrize(
    ("engine", "name"), [({"token_budget": 0}, "token_budget"), ({"tokens": 3}, "tokens"), ({"ageing_s": -1}, "ageing")]
)
def test_wrong_limits_are_named(engine: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        SimSettings(engine=engine).engine_config()
