"""Ports for listeners: nobody's, and nobody's by chance a moment later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cluster.free_ports import free_ports

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not OUTGOING.exists(), reason="needs Linux's /proc")
def test_free_ports_are_none_that_outgoing_connections_take() -> None:
    """HAProxy did not start: a connection had got its port since it was found free."""
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert max(ports) < int(OUTGOING.read_text().split()[0])


def test_a_port_that_somebody_has_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setattr("cluster.free_ports._PORTS", range(port, port + 1))
    assert free_ports(1) == [port]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        with pytest.raises(OSError, match="no 1 free ports"):
            free_ports(1)
