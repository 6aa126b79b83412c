"""From answers to figures, from figures to medians, and from a model's shape to floors."""

from __future__ import annotations

import pytest

from cluster.bench.driver import Drive
from cluster.bench.measures import measure
from cluster.bench.model_costs import ModelCosts
from cluster.bench.peer import TimedAnswer
from cluster.bench.run_meter import Usage
from cluster.bench.run_record import RunRecord, Verdict
from cluster.bench.summary import Spread, summarise

SMOL = {
    "dtype": "bfloat16",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def answer(first_s: float, *, cached: int | None = 0, answer_tokens: int = 11, prompt_tokens: int = 20) -> TimedAnswer:
    return TimedAnswer(
        text="x",
        first_s=first_s,
        last_s=first_s + 2.0,
        end_s=first_s + 2.5,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        cached_tokens=cached,
    )


def record(
    verdict: Verdict = Verdict.KEPT, *, peer: str = "a", noise: float | None = 0.0, **figures: float
) -> RunRecord:
    return RunRecord(
        peer=peer,
        workload="W1",
        repetition=0,
        attempt=0,
        verdict=verdict,
        at=0.0,
        figures=dict(figures),
        usage=Usage(noise=noise),
    )


def test_a_lone_request() -> None:
    figures = measure(Drive([[answer(0.5)]], 3.0))
    assert figures["ttft_s"] == 0.5
    assert figures["decode_tps"] == pytest.approx(5.0)
    assert figures["e2e_tps"] == pytest.approx(11 / 3)
    assert figures["prefill_tps"] == pytest.approx(40.0)


def test_conversations() -> None:
    figures = measure(Drive([[answer(1.0), answer(2.0, cached=8)], [answer(3.0), answer(6.0, cached=8)]], 4.0))
    assert figures["ttft_per_turn_s"] == (2.0, 4.0)
    assert figures["ttft_mean_s"] == 3.0
    assert figures["ttft_median_s"] == 2.5
    assert figures["cached_tokens"] == 16
    assert figures["out_tps"] == 11.0
    assert figures["total_tps"] == 31.0
    assert "decode_tps" not in figures


def test_cached_tokens_that_one_answer_does_not_report_are_unknown() -> None:
    assert measure(Drive([[answer(1.0), answer(1.0, cached=None)]], 4.0))["cached_tokens"] is None


def test_an_answer_that_came_at_once_has_no_decode_rate() -> None:
    at_once = TimedAnswer(text="x", first_s=1, last_s=1, end_s=1, prompt_tokens=1, answer_tokens=5, cached_tokens=None)
    assert measure(Drive([[at_once]], 1.0))["decode_tps"] is None


def test_only_kept_runs_count() -> None:
    records = [
        record(wall_s=3.0),
        record(Verdict.NOISY, wall_s=90.0),
        record(wall_s=1.0),
        record(Verdict.FAILED),
        record(wall_s=2.5),
        record(peer="b", wall_s=7.0),
    ]
    first, second = summarise(records)
    assert (first.peer, first.runs, first.kept, first.failed) == ("a", 5, 3, 1)
    assert first.figures["wall_s"] == Spread(2.5, 1.0, 3.0)
    assert second.median("wall_s") == 7.0


def test_a_figure_that_one_run_lacks_is_unknown() -> None:
    (summary,) = summarise([record(noise=0.1, cached_tokens=0.0), record(noise=None)])
    assert summary.figures["noise"] is None
    assert summary.figures["cached_tokens"] is None
    assert summary.median("nothing") is None


def test_turns_are_combined_turn_by_turn() -> None:
    rows = [(1.0, 5.0), (3.0, 4.0), (2.0, 9.0)]
    records = [record() for _ in rows]
    for run, row in zip(records, rows, strict=True):
        run.figures["ttft_per_turn_s"] = row
    (summary,) = summarise(records)
    assert summary.figures["ttft_per_turn_s"] == (2.0, 5.0)


def test_the_demo_models_costs() -> None:
    costs = ModelCosts.from_config(SMOL)
    assert costs is not None
    assert 2 * costs.layer_weights == pytest.approx(212.4e6, rel=1e-3)
    assert costs.packed_bytes == pytest.approx(269e6, rel=1e-3)
    one_more = costs.prefill_flops(1001) - costs.prefill_flops(1000)
    assert one_more == 2 * costs.layer_weights + 4 * 576 * 30 * 1001
    assert costs.prefill_flops(4096) / 4096 == pytest.approx(354e6, rel=2e-3)
    assert costs.decode_floor_tps(34.5e9) == pytest.approx(128, rel=0.01)
    assert costs.prefill_floor_s(4096, 468e9) == pytest.approx(4096 / 1322, rel=0.01)


@pytest.mark.parametrize("change", [{"hidden_size": None}, {"intermediate_size": "x"}, {"num_local_experts": 8}])
def test_a_model_of_another_kind_has_no_known_costs(change: dict[str, object]) -> None:
    assert ModelCosts.from_config(SMOL | change) is None
    assert ModelCosts.from_config({}) is None
