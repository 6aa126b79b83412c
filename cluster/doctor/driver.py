"""read_driver: what nvidia-smi says about the NVIDIA driver.

Owns: running it with a time limit and reading versions and devices from its output.
Does not: judge (cluster.doctor.device), or load the driver's library into this process.
Invariants: None means that there is no nvidia-smi, which is how a machine without such a driver looks.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

_TIMEOUT_S = 20.0  # a driver that is not kept loaded takes seconds to start

Run = Callable[[list[str]], "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    version: str = ""
    cuda: tuple[int, int] | None = None  # the newest CUDA that it supports
    devices: tuple[str, ...] = ()
    error: str = ""  # why nvidia-smi gave no answer


def read_driver(program: str | None = None, run: Run | None = None) -> Driver | None:
    program, run = program or shutil.which("nvidia-smi"), run or _run
    if program is None:
        return None
    try:
        page, devices = run([program]), run([program, "-L"])
    except (OSError, subprocess.TimeoutExpired) as error:
        return Driver(error=str(error))
    if page.returncode != 0:
        lines = (page.stdout + page.stderr).strip().splitlines()
        return Driver(error=lines[0] if lines else f"exit code {page.returncode}")
    version = re.search(r"Driver Version:\s*([\d.]+)", page.stdout)
    cuda = re.search(r"CUDA (?:\w+ )?Version:\s*(\d+)\.(\d+)", page.stdout)
    return Driver(
        version=version[1] if version else "unknown",
        cuda=(int(cuda[1]), int(cuda[2])) if cuda else None,
        devices=tuple(re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", devices.stdout, re.M)),
    )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
