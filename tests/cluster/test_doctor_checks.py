"""Each check of `kvray doctor`: what it says of which facts."""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.config import EngineConfig, IndexConfig
from cluster.core.errors import ConfigError
from cluster.doctor.attention import attention_check
from cluster.doctor.check import Check
from cluster.doctor.device import device_checks, device_of
from cluster.doctor.driver import Driver, read_driver
from cluster.doctor.index_server import ask_server, index_check
from cluster.doctor.ports import ports_check, try_to_bind
from cluster.doctor.ray_flags import RayProcess, needed_variables, ray_flags_check, ray_processes
from cluster.doctor.torch_build import TorchBuild, TorchDevice, read_torch
from cluster.index.base import IndexUnavailable
from cluster.index.private_server import PrivateRedis
from worker.kernels import native

H200 = TorchDevice("NVIDIA H200", (9, 0))
CPU_TORCH = TorchBuild(version="2.13.0+cpu")
CUDA_TORCH = TorchBuild(version="2.13.0", cuda=(12, 9), architectures=("sm_80", "sm_90"), devices=(H200,))
DRIVER = Driver(version="575.57", cuda=(12, 9), devices=("NVIDIA H200",))


def checks_of(
    wanted: str = "auto", driver: Driver | None = None, torch: TorchBuild = CPU_TORCH, cores: int = 4
) -> tuple[Check, Check, Check]:
    found_driver, found_torch, found_device = device_checks(wanted, driver, torch, cores)
    return found_driver, found_torch, found_device


def verdicts(checks: tuple[Check, ...]) -> list[str]:
    return [check.verdict for check in checks]


def test_a_machine_with_only_a_cpu_is_fine() -> None:
    driver, torch, device = checks = checks_of()
    assert verdicts(checks) == ["ok", "ok", "ok"]
    assert driver.detail == "no nvidia-smi; a CPU needs none"
    assert torch.detail == "2.13.0+cpu, without CUDA"
    assert device.detail == "cpu, 4 cores"
    assert checks_of(cores=1)[2].detail == "cpu, 1 core"


def test_a_machine_with_a_gpu() -> None:
    driver, torch, device = checks = checks_of(driver=DRIVER, torch=CUDA_TORCH)
    assert verdicts(checks) == ["ok", "ok", "ok"]
    assert driver.detail == "575.57, CUDA up to 12.9: NVIDIA H200"
    assert torch.detail == "2.13.0, built for CUDA 12.9"
    assert device.detail == "cuda: NVIDIA H200 (compute capability 9.0)"
    assert checks_of("cpu", DRIVER, CUDA_TORCH)[2] == Check("device", "ok", "cpu, 4 cores")


@pytest.mark.parametrize(
    ("driver", "torch", "advice"),
    [
        (None, CPU_TORCH, "install a torch with CUDA and an NVIDIA driver, or use another"),
        (DRIVER, CPU_TORCH, "install a torch with CUDA, or use another"),
        (None, TorchBuild(version="2.13.0", cuda=(13, 0)), "install an NVIDIA driver, or use another"),
        (DRIVER, TorchBuild(version="2.13.0", cuda=(13, 0)), "make the torch and driver checks pass, or use another"),
    ],
)
def test_cuda_that_is_asked_for_and_not_there(driver: Driver | None, torch: TorchBuild, advice: str) -> None:
    device = checks_of("cuda", driver, torch)[2]
    assert device == Check("device", "failed", "cuda is asked for, but torch finds no device", advice)


def test_a_gpu_that_torch_cannot_use_is_a_warning() -> None:
    device = checks_of(driver=DRIVER)[2]
    assert device == Check("device", "warning", "cpu, 4 cores; torch cannot use the GPU", "install a torch with CUDA")


@pytest.mark.parametrize(
    ("built", "supported", "verdict"),
    [((13, 0), (12, 9), "warning"), ((12, 9), (12, 4), "ok"), ((12, 1), (13, 0), "ok"), ((13, 0), None, "ok")],
)
def test_torch_against_the_driver(built: tuple[int, int], supported: tuple[int, int] | None, verdict: str) -> None:
    torch = checks_of(driver=Driver(version="1", cuda=supported), torch=TorchBuild(version="2", cuda=built))[1]
    assert torch.verdict == verdict
    if verdict == "warning":
        assert torch.detail == "2, built for CUDA 13.0; the driver supports up to 12.9"
        assert torch.advice == "update the driver, or install a torch for CUDA 12"


@pytest.mark.parametrize(
    ("capability", "architectures", "verdict"),
    [
        ((9, 0), ("sm_80", "sm_90"), "ok"),
        ((8, 9), ("sm_80",), "ok"),
        ((8, 0), ("sm_86",), "warning"),
        ((9, 0), ("sm_80",), "warning"),
        ((9, 0), ("compute_80",), "ok"),
        ((8, 0), ("compute_90", "sm_90"), "warning"),
        ((10, 0), ("sm_90a", "sm_100"), "ok"),
        ((10, 3), ("sm_100a", "sm_90"), "warning"),
        ((12, 0), ("sm_120", "oddity"), "ok"),
    ],
)
def test_torch_against_the_device(capability: tuple[int, int], architectures: tuple[str, ...], verdict: str) -> None:
    device = TorchDevice("a GPU", capability)
    torch = TorchBuild(version="2", cuda=(12, 9), architectures=architectures, devices=(device,))
    assert checks_of(torch=torch)[1].verdict == verdict


def test_a_broken_torch_and_a_broken_driver() -> None:
    driver, torch, device = checks_of(
        driver=Driver(error="couldn't communicate"), torch=TorchBuild(error="libcudart.so")
    )
    assert driver.verdict == "warning" and driver.detail == "nvidia-smi: couldn't communicate"
    assert torch.verdict == "failed" and torch.detail == "does not import: libcudart.so"
    assert device.verdict == "ok"


def test_the_device_of_a_replica() -> None:
    assert [device_of("auto", torch) for torch in (CPU_TORCH, CUDA_TORCH)] == ["cpu", "cuda"]
    assert [device_of("cpu", CUDA_TORCH), device_of("cuda", CPU_TORCH)] == ["cpu", "cuda"]


SMI = """
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 575.57.08              Driver Version: 575.57.08      CUDA Version: 12.9     |
|-----------------------------------------+------------------------+----------------------+
"""
SMI_LIST = "GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)\n  MIG 1g.18gb Device 0: (UUID: MIG-1)\n"


def test_what_nvidia_smi_prints() -> None:
    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, SMI_LIST if "-L" in command else SMI, "")

    found = read_driver("nvidia-smi", run)
    assert found == Driver(version="575.57.08", cuda=(12, 9), devices=("NVIDIA H200", "NVIDIA H200"))


def test_nvidia_smi_that_fails() -> None:
    def fails(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 9, "NVIDIA-SMI has failed.\nMore.", "")

    def hangs(command: list[str]) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, 20)

    assert read_driver("nvidia-smi", fails) == Driver(error="NVIDIA-SMI has failed.")
    found = read_driver("nvidia-smi", hangs)
    assert found is not None and "timed out" in found.error
    missing = read_driver("/no/such/program")
    assert missing is not None and "No such file" in missing.error


def test_the_torch_of_this_machine() -> None:
    import torch

    found = read_torch()
    assert found.version == torch.__version__ and not found.error
    assert bool(found.devices) == torch.cuda.is_available()


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
needs_native = pytest.mark.skipif(native.module() is None, reason="the native kernels are not built in")


def engine(**options: Any) -> EngineConfig:
    return EngineConfig.model_validate(options)


@needs_native
def test_the_native_backend(caplog: pytest.LogCaptureFixture) -> None:
    assert attention_check(engine(), "cpu") == Check("attention", "ok", "cpu for block size 16, head dim 64 (assumed)")
    whole = attention_check(engine(), "cpu", LLAMA)
    assert whole == Check("attention", "ok", "cpu for block size 16, head dim 64, whole layers in one native call")
    other = attention_check(engine(), "cpu", {"model_type": "gpt_neox", "hidden_size": 96, "num_attention_heads": 4})
    assert other.verdict == "ok"
    assert other.detail.startswith("cpu for block size 16, head dim 24, the model through transformers (")
    assert not caplog.records
    assert logging.getLogger("worker.kernels").propagate


@needs_native
def test_sizes_that_the_native_kernels_do_not_fit() -> None:
    odd = {"block_size": 24, "chunk_tokens": 24}
    for model in (None, LLAMA):
        found = attention_check(engine(cache=odd), "cpu", model)
        assert found.verdict == "warning" and found.detail.startswith("reference for block size 24, head dim 64")
        assert "block size 24" in found.detail.partition(". ")[2]
        assert found.advice == "take a --block-size that divides 256, such as 16"
        failed = attention_check(engine(cache=odd, attention_backend="cpu"), "cpu", model)
        assert failed.verdict == "failed" and "attention backend cpu" in failed.detail


def test_the_backend_that_is_asked_for() -> None:
    assert attention_check(engine(attention_backend="reference"), "cpu", LLAMA).detail.startswith("reference for")
    refused = attention_check(engine(attention_backend="cpu"), "cuda")
    assert refused.verdict == "failed" and "cpu does not run on cuda" in refused.detail


def test_missing_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_cpu", None)
    monkeypatch.setattr(native, "_reason", "the native kernels are not built in (no such file)")
    for model in (None, LLAMA):
        found = attention_check(engine(), "cpu", model)
        assert found.verdict == "warning"
        assert "the native kernels are not built in (no such file)" in found.detail
        assert found.advice == "install a C++ compiler and run `make install` again"


URL = "redis://me:secret@host:6379/0"
SHOWN = "redis://***@host:6379/0"


def index(url: str | None = URL, **answer: Any) -> Check:
    def ask(url: str, timeout_s: float) -> Mapping[str, Any]:
        if "error" in answer:
            raise answer["error"]
        return answer

    return index_check(IndexConfig(redis_url=url), SHOWN, ask=ask, find=lambda: Path("/usr/bin/redis-server"))


def test_a_server_that_answers() -> None:
    assert index(redis_version="7.2.4") == Check("redis", "ok", f"{SHOWN}: redis 7.2.4")
    assert index(redis_version="7.2.4", valkey_version="9.1.2").detail == f"{SHOWN}: valkey 9.1.2"
    assert index().detail == f"{SHOWN}: redis unknown"
    old = index(redis_version="4.0.9")
    assert (old.verdict, old.advice) == ("failed", "install version 5 or newer")


@pytest.mark.parametrize("error", [IndexUnavailable("Redis cannot answer: refused"), ValueError(f"bad {URL}")])
def test_a_server_that_does_not_answer(error: Exception) -> None:
    found = index(error=error)
    assert found.verdict == "failed" and found.advice
    assert "secret" not in found.detail


def test_the_private_server() -> None:
    assert index(None) == Check("redis", "ok", "a private server will be started: /usr/bin/redis-server")

    def find() -> Path:
        raise ConfigError("no Redis-compatible server found")

    found = index_check(IndexConfig(), "", find=find)
    assert (found.verdict, found.detail) == ("failed", "no Redis-compatible server found")


@pytest.mark.redis
def test_a_real_server() -> None:
    with PrivateRedis() as server:
        found = index_check(IndexConfig(redis_url=server.url), server.url)
        assert found.verdict == "ok" and server.url in found.detail
        assert ask_server(server.url, 2.0)["tcp_port"] == server.port
    stopped = index_check(IndexConfig(redis_url=server_url_of_nobody()), "redis://127.0.0.1")
    assert stopped.verdict == "failed" and "Redis cannot answer" in stopped.detail
    assert (
        "http://x: the Redis URL must start with" in index_check(IndexConfig(redis_url="http://x"), "http://x").detail
    )


def server_url_of_nobody() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"redis://127.0.0.1:{sock.getsockname()[1]}/0"


PORTS = {"HTTP": 8000, "gRPC": 9000}


def ports(*, ray_runs: bool = False, **codes: int) -> Check:
    taken = {PORTS[name]: code for name, code in codes.items()}
    return ports_check("127.0.0.1", PORTS, ray_runs=ray_runs, attempt=lambda host, port: taken.get(port, 0))


def test_ports() -> None:
    assert ports() == Check("ports", "ok", "HTTP 127.0.0.1:8000, gRPC 127.0.0.1:9000: free")
    taken = ports(gRPC=errno.EADDRINUSE)
    assert (taken.verdict, taken.detail) == ("failed", "gRPC 127.0.0.1:9000: address already in use")
    assert "--grpc-port" in taken.advice and "--port" not in taken.advice
    ours = ports(HTTP=errno.EADDRINUSE, gRPC=errno.EADDRINUSE, ray_runs=True)
    assert ours.verdict == "warning" and "--port or --grpc-port" in ours.advice
    assert ports(HTTP=errno.EACCES, ray_runs=True).verdict == "failed"


def test_the_same_port_twice() -> None:
    found = ports_check("127.0.0.1", {"HTTP": 8000, "gRPC": 8000}, ray_runs=False, attempt=lambda host, port: 0)
    assert (found.verdict, found.advice) == ("failed", "give each its own")


def test_real_ports() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        assert try_to_bind("127.0.0.1", sock.getsockname()[1]) == errno.EADDRINUSE
    assert try_to_bind("127.0.0.1", 0) == 0
    assert try_to_bind("no such host", 0) == errno.EADDRNOTAVAIL


def fake_process(proc: Path, pid: int, arguments: list[str], environment: dict[str, str] | bytes) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_bytes("\0".join([*arguments, ""]).encode())
    if isinstance(environment, dict):
        environment = "\0".join([*(f"{name}={value}" for name, value in environment.items()), ""]).encode()
    (folder / "environ").write_bytes(environment)


SITE = "/env/lib/python3.11/site-packages"


def test_ray_processes_of_this_user(tmp_path: Path) -> None:
    good = {"RAY_AUTH_MODE": "disabled", "A": "x=y"}
    fake_process(tmp_path, 30, [f"{SITE}/ray/core/src/ray/raylet/raylet", "--x=1"], good)
    fake_process(tmp_path, 20, ["/env/bin/python", "-u", f"{SITE}/ray/_private/log_monitor.py"], good)
    fake_process(tmp_path, 100, ["ray::ServeReplica:kvray:Replica   "], {"B": ""})
    fake_process(tmp_path, 40, ["ray::RuntimeEnvAgent"], b"\0\0\0B=1\0")  # its title lies over its environment
    fake_process(tmp_path, 50, ["python", "/home/me/ray/train.py"], good)
    fake_process(tmp_path, 60, [""], b"")
    (tmp_path / "70").mkdir()  # it has just ended
    (tmp_path / "self").mkdir()
    assert ray_processes(tmp_path) == [
        RayProcess(20, "log_monitor.py", frozenset(good)),
        RayProcess(30, "raylet", frozenset(good)),
        RayProcess(40, "ray::RuntimeEnvAgent", frozenset()),
        RayProcess(100, "ray::ServeReplica:kvray:Replica", frozenset({"B"})),
    ]
    assert ray_processes(tmp_path, user=os.getuid() + 1) == []
    assert ray_processes(tmp_path / "missing") == []


def test_ray_flags() -> None:
    needed = needed_variables()
    assert "RAY_SERVE_THROUGHPUT_OPTIMIZED" in needed
    good = RayProcess(1, "raylet", needed | {"HOME"})
    unknown = RayProcess(2, "ray::RuntimeEnvAgent", frozenset())
    assert ray_flags_check([], needed) == Check("ray", "ok", "none running")
    found = ray_flags_check([good, unknown], needed)
    assert (found.verdict, found.detail) == ("ok", "2 processes; 1 show their environment, with all variables")
    partial = RayProcess(3, "gcs_server", needed - {"RAY_AUTH_MODE"})
    found = ray_flags_check([good, unknown, partial], needed)
    assert (found.verdict, found.detail) == ("failed", "1 of 2 processes lack RAY_AUTH_MODE: gcs_server (3)")
    bare = [RayProcess(pid, "ray::Worker", frozenset({"HOME"})) for pid in range(10, 15)]
    found = ray_flags_check(bare, ["A", "B", "C", "D"])
    assert found.detail == (
        "5 of 5 processes lack A, B, C and 1 more: ray::Worker (10), ray::Worker (11), ray::Worker (12) and 2 more"
    )
