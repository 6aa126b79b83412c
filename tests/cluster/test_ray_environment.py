"""The variables of every Ray process: the same on one machine and on many, and what the user has set is kept."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from cluster import ray_environment as module
from cluster.ray_environment import apply_environment, cluster_environment, free_ports, ray_environment, serve_flags

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


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


@pytest.mark.skipif(not OUTGOING.exists(), reason="needs Linux's /proc")
def test_free_ports_are_none_that_outgoing_connections_take() -> None:
    """HAProxy did not start: a connection had got its port since it was found free."""
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert max(ports) < int(OUTGOING.read_text().split()[0])


def test_a_port_that_somebody_has_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setattr(module, "_PORTS", range(port, port + 1))
    assert free_ports(1) == [port]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        with pytest.raises(OSError, match="no 1 free ports"):
            free_ports(1)
