"""describe_machine: what a reader of a result must know about where it was made.

Owns: the machine's facts, the versions, and the command line.
Does not: measure anything (machine_probe).
Invariants: a fact that cannot be found is left out; no host name, user name or path of the machine is in it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
_PACKAGES = ("kvray", "ray", "torch", "transformers", "aiohttp")


@dataclass(frozen=True, slots=True)
class MachineNote:
    command: str
    machine: dict[str, str]
    versions: dict[str, str]

    def text(self) -> str:
        machine = ", ".join(self.machine.values())
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"`{self.command}` on {machine}; {versions}."


def describe_machine(arguments: Sequence[str], proc: Path = Path("/proc")) -> MachineNote:
    return MachineNote(f"kvray {' '.join(arguments)}", _machine(proc), _versions())


def _machine(proc: Path) -> dict[str, str]:
    facts = {"cores": f"{os.cpu_count()} cores"}
    with suppress(OSError):
        model, features = parse_cpu((proc / "cpuinfo").read_text())
        facts |= {"cpu": model, "features": " ".join(features) or "none of the wider vector units"}
    with suppress(OSError, StopIteration):
        total = next(line for line in (proc / "meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
        facts["memory"] = f"{int(total.split()[1]) / 2**20:.0f} GiB"
    return facts


def parse_cpu(text: str) -> tuple[str, list[str]]:
    """The first core's name, and those of its features that decide how fast matrices are multiplied."""
    first = text.split("\n\n")[0]
    fields = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines()) if value
    }
    flags = set(fields.get("flags", "").split())
    return fields.get("model name", platform.machine()), [feature for feature in _FEATURES if feature in flags]


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    with suppress(OSError, subprocess.SubprocessError):
        command = ("git", "describe", "--always", "--dirty")
        folder = Path(__file__).parent
        said = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
        found["commit"] = said.stdout.strip()
    return found
