"""Section `versions`: the device, what is installed for it, and which attention backends are possible or why not.

Owns: the choice of facts.
Does not: look at driver and torch itself (cluster.doctor does) or choose backends (worker.kernels does).
Invariants: it computes nothing on the device.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.environment import GpuEnvironment, Skip
from benchmarks.gpu.report import Row, first_line
from cluster.core.byte_size import format_bytes
from cluster.doctor.device import device_checks
from cluster.doctor.driver import read_driver
from cluster.doctor.torch_build import read_torch
from worker.kernels import select_backend

PACKAGES = ("triton", "transformers", "vllm-flash-attn", "vllm")
BLOCK_SIZE, HEAD_DIM = 16, 128


def versions(environment: GpuEnvironment) -> Iterator[Row]:
    yield environment.attempt("kvray", _commit)
    for check in device_checks(environment.device.type, read_driver(), read_torch(), os.cpu_count() or 1):
        advice = f"; {check.advice}" if check.advice else ""
        yield Row(check.name, check.verdict, check.detail + advice)
    yield environment.attempt("processors and memory", lambda: _properties(environment.device))
    yield Row("packages", "ok", ", ".join((f"Python {platform.python_version()}", *map(_version, PACKAGES))))
    for name in dict.fromkeys(setup.backend for setup in environment.setups):
        yield environment.attempt(f"backend {name}", partial(_possible, environment, name))


def why_no_cuda() -> str | None:
    """One line; None when there is a device that torch can use."""
    if torch.cuda.is_available():
        return None
    build, driver = read_torch(), read_driver()
    kind = f"built for CUDA {'.'.join(map(str, build.cuda))}" if build.cuda else "built without CUDA"
    drivers = "there is no nvidia-smi" if driver is None else f"driver: {driver.error or driver.version}"
    return f"torch {build.version}, {kind}, finds none; {drivers}"


def _commit() -> str:
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Skip(f"git does not tell the commit: {first_line(error)}") from None
    return done.stdout.strip()


def _properties(device: torch.device) -> str:
    if device.type != "cuda":
        raise Skip(f"no such facts of {device.type}")
    found = torch.cuda.get_device_properties(device)
    return f"{found.multi_processor_count} multiprocessors, {format_bytes(found.total_memory)}"


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


def _possible(environment: GpuEnvironment, name: str) -> str:
    """ConfigError with the reason when it is not."""
    dtype = getattr(torch, environment.half)
    select_backend(environment.device.type, name, 1, BLOCK_SIZE, HEAD_DIM, dtype)
    return f"possible for block size {BLOCK_SIZE}, head dim {HEAD_DIM}, {environment.half}"
