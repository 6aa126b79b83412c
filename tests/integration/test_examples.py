"""The examples run as a reader would run them, and health and reflection answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(300)]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )


def test_grpc_client(cluster: Any) -> None:
    done = run("examples/grpc_client.py", "--address", cluster.grpc_address, "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "prompt tokens" in done.stderr


def test_grpc_client_says_when_nobody_answers() -> None:
    done = run("examples/grpc_client.py", "--address", "127.0.0.1:1", "Hello")
    assert done.returncode == 1
    assert done.stderr.startswith("UNAVAILABLE")


def test_openai_client(cluster: Any) -> None:
    done = run("examples/openai_client.py", "--base-url", f"{cluster.http_url}/v1", "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "from the cache" in done.stderr


def test_status_command(cluster: Any) -> None:
    done = run("-m", "cluster.cli", "status", "--address", cluster.grpc_address)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


def test_health_and_reflection(cluster: Any) -> None:
    with cluster.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvray.v1.Inference"):
            reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=20)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        names = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {"kvray.v1.Inference", "kvray.v1.Cache", "grpc.health.v1.Health"} <= set(names)
    assert httpx.get(f"{cluster.http_url}/health", timeout=20).json() == {"status": "alive"}
    ready = httpx.get(f"{cluster.http_url}/ready", timeout=20)
    assert (ready.status_code, set(ready.json()["replicas"].values())) == (200, {"ready"})
    models = httpx.get(f"{cluster.http_url}/v1/models", timeout=20).json()
    assert [m["id"] for m in models["data"]] == ["demo"]
