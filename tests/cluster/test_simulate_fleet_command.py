"""`kvray simulate` on a fleet: options, files and what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import ConfigError
from cluster.simulate.policy_lineup import LINEUP
from cluster.simulate_fleet_command import run_fleet
from cluster.simulate_options import FleetOptions, parse_kill


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [
        {"timestamp": 3000 * (n // 4), "input_length": 1100 + n, "output_length": 5 + n, "hash_ids": [0, n % 5 + 1, n]}
        for n in range(10, 50)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options(trace: Path, **changes: Any) -> FleetOptions:
    values: dict[str, Any] = {
        "trace": trace,
        "replicas": 3,
        "policy": "all",
        "speed": None,
        "rate": None,
        "load": None,
        "limit": None,
        "cold_share": None,
        "kv_tokens": 50_000,
        "event_lag_ms": 0.0,
        "kill": None,
        "step_time": None,
        "token_budget": 2048,
        "max_num_seqs": 64,
        "prefix_first": True,
        "ageing_s": 2.0,
        "hold_back": True,
        "seed": 0,
        "png": None,
    }
    return FleetOptions(**{**values, **changes})


def printed(capsys: pytest.CaptureFixture[str], chosen: FleetOptions) -> dict[str, Any]:
    assert run_fleet(chosen, as_json=True) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    for report in found["policies"]:
        assert report.pop("wall_s") > 0 and report.pop("decisions_per_s") > 0
    return found


def test_every_policy_is_in_the_output_and_the_same_inputs_print_the_same(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = printed(capsys, options(trace, rate=4.0, event_lag_ms=200.0))
    assert found == printed(capsys, options(trace, rate=4.0, event_lag_ms=200.0))
    assert [report["policy"] for report in found["policies"]] == [entry.name for entry in LINEUP]
    assert all(report["finished"] == 40 and not report["shed"] for report in found["policies"])
    assert 0 < found["clairvoyant_mean_ttft_s"] <= min(report["ttft"]["mean"] for report in found["policies"])


def test_people_get_a_table_and_a_picture(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "fleet.png"
    assert run_fleet(options(trace, policy="estimated_ttft,llm_d", png=png, kill="1@5"), as_json=False) == 0
    printed_text = capsys.readouterr().out
    assert "estimated_ttft" in printed_text and "llm_d" in printed_text and "round_robin" not in printed_text
    assert "clairvoyant bound" in printed_text
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_load_finds_its_speed(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, options(trace, policy="least_uncached", load=0.5))
    assert found["speed"] > 1.0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"speed": 1.0, "rate": 2.0}, "give one"),
        ({"rate": 0.0}, "--rate must be a number above 0"),
        ({"load": 1.5}, "below 1"),
        ({"replicas": 0}, "--replicas must be at least 1"),
        ({"kv_tokens": 100}, "--kv-tokens must be at least 512"),
        ({"kill": "9@3"}, "--kill names replica 9"),
        ({"kill": "soon"}, "is not REPLICA@SECONDS"),
        ({"policy": "fastest"}, "unknown policy"),
        ({"event_lag_ms": -1.0}, "--event-lag must be 0 or more"),
        ({"cold_share": 2.0}, "--cold-share"),
    ],
)
def test_wrong_options_are_named(trace: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_fleet(options(trace, **changes), as_json=True)


def test_a_kill_names_a_replica_and_a_time() -> None:
    assert (parse_kill("3@120").replica, parse_kill("3@0.5").at_s) == (3, 0.5)
