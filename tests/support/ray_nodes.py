"""How the drills start Ray's processes: commands and environment of head and nodes, and patience with them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from process_keeper import Kept

from cluster.ray_environment import ray_environment

ROOT = Path(__file__).parents[2]
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_STARTED = "Ray runtime started"
_STORE = f"--object-store-memory={100 * 2**20}"
# Nothing that the drills have no use for: a head's start is the longest part of them.
_LEAN = ("--include-log-monitor=false", "--min-worker-port=0", "--max-worker-port=0")


def drill_environment(scratch: Path, drain_s: float, **more: str) -> dict[str, str]:
    """The whole environment of a Ray process, a driver or a load: this one's, ours, and the tree that is tested."""
    scratch.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    return {**os.environ, **ray_environment(scratch, drain_s), "PYTHONPATH": path, **more}


def head_command(address: str, port: int, temp_dir: str, *more: str) -> list[str]:
    place = (f"--node-ip-address={address}", f"--port={port}", f"--temp-dir={temp_dir}")
    return [*_RAY, "start", "--head", "--block", *place, "--include-dashboard=false", *_LEAN, _STORE, *more]


def node_command(gcs: str, address: str, temp_dir: str, *more: str) -> list[str]:
    place = (f"--address={gcs}", f"--node-ip-address={address}", f"--temp-dir={temp_dir}")
    return [*_RAY, "start", "--block", *place, *_LEAN, _STORE, *more]


def start_ray(start: Callable[[], Kept], attempts: int = 3, timeout_s: float = 90.0) -> Kept:
    """`start` runs `ray start`; returns once Ray runs there, before which a driver would wait for minutes in vain.

    On a busy machine Ray gives up when its agent is not there after 15 s, which no option changes. So it tries again.
    """
    for _ in range(attempts):
        kept = start()
        before, deadline = kept.said().count(_STARTED), time.monotonic() + timeout_s
        while time.monotonic() < deadline and kept.processes():
            if kept.said().count(_STARTED) > before:
                return kept
            time.sleep(0.2)
        kept.kill()
    raise AssertionError(f"Ray did not start:\n{kept.said()[-4000:]}")
