"""Serve takes one of two replicas away while both answer: no token is lost, nobody new gets there, its entries go."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import drain_run
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def test_a_replica_that_is_taken_away_finishes_and_leaves(demo_model_dir: Path) -> None:
    ray_temp_dir = tempfile.mkdtemp(prefix="kvd-")  # a short path: Ray makes sockets below it
    try:
        done = subprocess.run(
            [sys.executable, "-m", "drain_run", str(demo_model_dir), ray_temp_dir],
            capture_output=True,
            text=True,
            timeout=550,
            check=False,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])},
        )
    finally:
        shutil.rmtree(ray_temp_dir, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    victim, left = found["victim"], found["left"]
    assert {stream["replica"] for stream in found["streams"]} == {victim, *left}, "each had one to answer"
    assert [stream["tokens"] for stream in found["streams"]] == [drain_run.TOKENS] * 2
    assert {stream["ended_as"] for stream in found["streams"]} == {"FINISH_REASON_LENGTH"}
    assert found["still_running"], "it drained while it answered"
    assert len(left) == 1 and set(found["during"]) == set(left)
