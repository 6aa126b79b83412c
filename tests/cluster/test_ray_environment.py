"""The variables of every Ray process: the same on one machine and on many, and what the user has set is kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.ray_environment import apply_environment, cluster_environment, ray_environment, serve_flags


def test_one_machine_and_many_share_the_flags_of_serve(tmp_path: Path) -> None:
    assert serve_flags(30)["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
    for environment, notice_s in ((ray_environment(tmp_path, 30), 2.0), (cluster_environment(30), 10.0)):
        assert serve_flags(30, notice_s).items() <= environment.items()
        assert environment.get("RAY_SERVE_ENABLE_HA_PROXY", "1") == "1"


def test_many_machines_want_a_token_and_hold_none() -> None:
    environment = cluster_environment(30)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_TOKEN" not in environment


@pytest.mark.parametrize(("drain_s", "wanted"), [(0, "120"), (300, "300")])
def test_a_reloaded_proxy_outlives_the_streams_of_a_drain(drain_s: float, wanted: str) -> None:
    assert cluster_environment(drain_s)["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == wanted


def test_what_the_user_has_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "9")
    apply_environment({"RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1"})
    assert os.environ["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"] == "9"
