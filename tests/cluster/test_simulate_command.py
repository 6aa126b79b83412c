"""`kvray simulate`: options, files and what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import ConfigError
from cluster.simulate.step_times import EXAMPLE, read_step_time
from cluster.simulate_command import SimulateOptions, run_simulate


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [
        {"timestamp": 3000 * (n // 4), "input_length": 700 + n, "output_length": 5 + n, "hash_ids": [0, n % 5 + 1]}
        for n in range(40)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options(trace: Path, **changes: Any) -> SimulateOptions:
    values: dict[str, Any] = {
        "trace": trace,
        "engine_only": True,
        "speed": None,
        "load": None,
        "limit": None,
        "cold_share": None,
        "kv_blocks": None,
        "block_size": 64,
        "step_time": None,
        "seed": 0,
        "engine": {"token_budget": 512, "max_num_seqs": None},
    }
    return SimulateOptions(**{**values, **changes})


def printed(capsys: pytest.CaptureFixture[str], chosen: SimulateOptions) -> dict[str, Any]:
    assert run_simulate(chosen, as_json=True) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report.pop("wall_s") > 0
    return report


def test_the_same_inputs_print_the_same(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = printed(capsys, options(trace, speed=4.0))
    assert report == printed(capsys, options(trace, speed=4.0))
    assert report["finished"] == 40
    assert report["speed"] == 4.0
    assert report != printed(capsys, options(trace, speed=4.0, seed=1))


def test_people_get_a_table(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_simulate(options(trace, limit=10), as_json=False) == 0
    out = capsys.readouterr().out
    assert "TTFT" in out and "finished 10, refused 0" in out and "speed 1," in out


def test_a_load_finds_the_speed_and_prints_it(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = printed(capsys, options(trace, load=0.5))
    full = printed(capsys, options(trace, load=1.0))
    assert full["speed"] == pytest.approx(2 * half["speed"])
    assert full["busy_share"] > half["busy_share"]


def test_the_pool_and_the_step_times_are_used(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"step_time": [2 * value for value in EXAMPLE.to_wire()], "model": "m"}))
    once = printed(capsys, options(trace, limit=1))
    assert printed(capsys, options(trace, limit=1, step_time=file))["ttft"]["p50"] == pytest.approx(
        2 * once["ttft"]["p50"]
    )
    assert printed(capsys, options(trace, kv_blocks=11))["refused"] > 0  # 704 tokens


def test_a_cold_share_changes_the_trace(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, options(trace))["ttft_new"]["count"] == 5
    assert printed(capsys, options(trace, cold_share=0.05))["ttft_new"]["count"] == 2
    with pytest.raises(ConfigError, match="cold"):
        run_simulate(options(trace, cold_share=0.9), as_json=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine_only": False}, "--engine-only"),
        ({"speed": 1.0, "load": 0.5}, "--speed and --load"),
        ({"speed": 0.0}, "--speed"),
        ({"speed": float("nan")}, "--speed"),
        ({"load": float("inf")}, "--load"),
        ({"cold_share": 0.0}, "--cold-share"),
        ({"cold_share": 1.5}, "--cold-share"),
        ({"limit": 0}, "--limit"),
        ({"kv_blocks": 0}, "--kv-blocks"),
        ({"block_size": 0}, "--block-size"),
        ({"engine": {"token_budget": 0}}, "token_budget"),
        ({"trace": Path("absent.jsonl")}, "absent.jsonl"),
        ({"step_time": Path("absent.json")}, "absent.json"),
    ],
)
def test_what_cannot_be_is_one_clear_line(trace: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        run_simulate(options(**{"trace": trace, **changes}), as_json=True)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["", "[]", "[0.1]", "{}", '{"step_time": [1, 2]}', '{"step_time": [1, 2, 3, 4, NaN]}'])
def test_a_file_that_is_no_calibration(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"calibration.json is no calibration"):
        read_step_time(path)
