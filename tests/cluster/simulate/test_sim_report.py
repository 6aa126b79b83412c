"""Percentiles, classes, and what the table shows."""

from __future__ import annotations

import json
import random

import pytest
from rich.console import Console
from sim_world import request, simulate

from cluster.simulate.sim_report import make_report, spread, to_lines, to_table


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    random.Random(0).shuffle(values)
    found = spread(values)
    assert found is not None
    assert (found.count, found.mean, found.p50, found.p90, found.p99, found.max) == (100, 50.5, 50, 90, 99, 100)


def test_counts_weigh() -> None:
    assert spread([1.0, 5.0, 3.0], [98, 1, 1]) == spread([1.0] * 98 + [3.0, 5.0])


@pytest.mark.parametrize(("values", "counts"), [([], None), ([1.0], [0])])
def test_of_nothing_there_is_no_spread(values: list[float], counts: list[int] | None) -> None:
    assert spread(values, counts) is None


def test_gaps_between_tokens_are_those_of_the_steps() -> None:
    result = simulate([request(0, 0.0, 8, 4, 0), request(1, 0.5, 8, 2, 1)])
    found = spread(result.log.gaps, result.log.gap_counts)
    assert found is not None
    assert found.count == 4  # three of the first, one of the second
    assert found.max == pytest.approx(1.2)  # both decode, which two rows felt
    assert found.p50 == pytest.approx(1.18)  # the second one's prefill beside the first one's decode


def test_cold_and_warm_by_what_was_found() -> None:
    prompt = 600 + 8
    ids = tuple(range(prompt // 8))
    trace = [request(0, 0.0, prompt, 1, *ids), request(1, 99.0, prompt, 1, *ids), request(2, 200.0, 8, 1, 900)]
    report = make_report(trace, simulate(trace, num_blocks=400), speed=2.0, wall_s=1.0)
    assert report.ttft and report.ttft_cold and report.ttft_warm and report.ttft_new and report.ttft_seen
    assert (report.ttft.count, report.ttft_cold.count, report.ttft_warm.count) == (3, 2, 1)
    assert (report.ttft_new.count, report.ttft_seen.count) == (2, 1)
    assert report.ttft_warm.max == pytest.approx(1.1)  # one token is left to compute
    assert report.hit_rate == pytest.approx((prompt - 1) / (2 * prompt + 8))
    assert report.ideal_hit_rate == report.hit_rate
    assert report.finished == 3
    json.dumps(report.to_json(), allow_nan=False)


def test_the_table_shows_missing_figures_as_none() -> None:
    trace = [request(0, 0.0, 8, 1, 0)]
    report = make_report(trace, simulate(trace), speed=1.0, wall_s=0.5)
    console = Console(width=120, record=True)
    with console.capture() as shown:
        console.print(to_table(report))
        console.print("\n".join(to_lines(report)))
    text = shown.get()
    assert "TTFT warm" in text and "finished 1, refused 0" in text and "busy 100.0%" in text
