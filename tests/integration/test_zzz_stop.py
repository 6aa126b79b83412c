"""Ctrl-C ends everything `kvray serve` started, within seconds. Runs after all other tests of the cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(120)]


def session_members(sid: int) -> list[str]:
    """Commands of all processes in a session (Ray's and ours inherit it)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[3]) == sid:
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100])
            except (OSError, IndexError):
                continue
    return found


def test_ctrl_c_leaves_no_process(cluster: Any) -> None:
    import os
    import signal

    assert len(session_members(cluster.process.pid)) > 5
    started = time.monotonic()
    os.killpg(cluster.process.pid, signal.SIGINT)
    assert cluster.process.wait(45) == 0
    assert time.monotonic() - started < 30
    deadline = time.monotonic() + 10
    while (left := session_members(cluster.process.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
    assert "stopped" in cluster.log.read_text()
