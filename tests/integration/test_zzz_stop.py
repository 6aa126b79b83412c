"""Ctrl-C and SIGTERM end all that `kvray serve` started, within seconds. Runs after all other tests of the cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
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


def ends_cleanly(cluster: Any, send: Callable[[int, int], None], number: int) -> None:
    assert len(session_members(cluster.process.pid)) > 5
    started = time.monotonic()
    send(cluster.process.pid, number)
    assert cluster.process.wait(45) == 0
    assert time.monotonic() - started < 30
    deadline = time.monotonic() + 10
    while (left := session_members(cluster.process.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
    assert "stopped" in cluster.log.read_text()


def test_ctrl_c_leaves_no_process(cluster: Any) -> None:
    ends_cleanly(cluster, os.killpg, signal.SIGINT)


def test_sigterm_does_the_same(small_cluster: Any) -> None:
    """Ray's own handler would abort the process 3 s later, in the middle of stopping."""
    deadline = time.monotonic() + 60
    while "Ctrl-C stops everything" not in small_cluster.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    ends_cleanly(small_cluster, os.kill, signal.SIGTERM)
