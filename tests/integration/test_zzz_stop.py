"""Ctrl-C and SIGTERM end all that `kvray serve` started, within seconds. Runs after all other tests of the cluster.

The second cluster serves two models, and answers for both before it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from cluster.rpc import inference_pb2 as pb
from cluster.rpc import inference_pb2_grpc as rpc

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(300)]


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


def test_two_models_of_one_file_are_served_side_by_side(two_models: Any) -> None:
    prompt = " ".join(f"w{4 + number % 90}" for number in range(80))

    def over_http(url: str, model: str) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60)

    def cached(reply: httpx.Response) -> int:
        assert reply.status_code == 200, reply.text
        return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    one, two = two_models.http_url, f"{two_models.http_url}/two"
    for url, name in ((one, "tiny-one"), (two, "tiny-two")):
        (model,) = httpx.get(f"{url}/v1/models", timeout=20).json()["data"]
        assert model["id"] == name
        # Both hold the same weights; a hit on the first request would be the other's.
        assert cached(over_http(url, name)) == 0
        assert cached(over_http(url, name)) >= 64
    assert over_http(one, "tiny-two").status_code == over_http(two, "tiny-one").status_code == 404

    request = pb.GenerateRequest(text=prompt, sampling=pb.SamplingOptions(max_tokens=4, ignore_eos=True))
    with two_models.channel() as channel:
        stub = rpc.InferenceStub(channel)
        served = set()
        for name in ("one", "two"):
            *_, last = stub.Generate(request, timeout=60, metadata=(("application", name),))
            assert last.usage.cached_tokens >= 64 and last.usage.completion_tokens == 4
            served.add(last.replica)
        assert len(served) == 2
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(request, timeout=60))
        assert refused.value.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE)
    status = [
        sys.executable,
        "-m",
        "cluster.cli",
        "status",
        "--address",
        two_models.grpc_address,
        "--application",
        "two",
    ]
    told = subprocess.run(status, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "tiny-two" in told and "tiny-one" not in told


def test_sigterm_does_the_same(two_models: Any) -> None:
    """Ray's own handler would abort the process 3 s later, in the middle of stopping."""
    deadline = time.monotonic() + 60
    while "Ctrl-C stops everything" not in two_models.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    ends_cleanly(two_models, os.kill, signal.SIGTERM)
