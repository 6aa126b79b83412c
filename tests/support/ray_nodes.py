"""How the drills start Ray's processes: commands and environment of head and nodes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cluster.ray_environment import ray_environment

ROOT = Path(__file__).parents[2]
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_STORE = f"--object-store-memory={100 * 2**20}"


def drill_environment(scratch: Path, drain_s: float, **more: str) -> dict[str, str]:
    """The whole environment of a Ray process, a driver or a load: this one's, ours, and the tree that is tested."""
    scratch.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    return {**os.environ, **ray_environment(scratch, drain_s), "PYTHONPATH": path, **more}


def head_command(address: str, port: int, temp_dir: str, *more: str) -> list[str]:
    place = (f"--node-ip-address={address}", f"--port={port}", f"--temp-dir={temp_dir}")
    return [*_RAY, "start", "--head", "--block", *place, "--include-dashboard=false", _STORE, *more]


def node_command(gcs: str, address: str, temp_dir: str, *more: str) -> list[str]:
    place = (f"--address={gcs}", f"--node-ip-address={address}", f"--temp-dir={temp_dir}")
    return [*_RAY, "start", "--block", *place, _STORE, *more]
