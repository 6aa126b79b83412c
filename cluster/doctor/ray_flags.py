"""ray_flags_check: has every running Ray process the variables that kvray needs in its environment?

A Ray that was started without them serves, but slowly and on its Python proxy; nothing else shows that.

Owns: finding this user's Ray processes in /proc and comparing the names in their environments.
Does not: compare values, since a user's own are kept, or look at other users' processes.
Invariants: a process that ends meanwhile is left out; one that wrote its title over its environment is not judged.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.doctor.check import Check
from cluster.ray_environment import ray_environment

_NAME = "ray"
_PLACES = ("/ray/core/src/ray/", "/ray/_private/", "/ray/autoscaler/_private/", "/ray/dashboard/")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class RayProcess:
    pid: int
    title: str
    variables: frozenset[str]  # names; empty: overwritten by the title


def needed_variables() -> frozenset[str]:
    return frozenset(ray_environment(Path(tempfile.gettempdir()), 0.0))


def ray_processes(proc: Path = Path("/proc"), user: int | None = None) -> list[RayProcess]:
    """Of `user` (default: who runs this)."""
    user = os.getuid() if user is None else user
    found = []
    for folder in proc.glob("[0-9]*"):
        try:
            if folder.stat().st_uid != user:
                continue
            arguments = _split(folder / "cmdline")
            if _is_ray(arguments):
                found.append(RayProcess(int(folder.name), _title(arguments), _variables(folder)))
        except OSError:  # it has ended, or hides its environment
            continue
    return sorted(found, key=lambda process: process.pid)


def ray_flags_check(processes: Sequence[RayProcess], needed: Iterable[str]) -> Check:
    if not processes:
        return Check(_NAME, "ok", "none running")
    readable = [process for process in processes if process.variables]
    missing = {process: sorted(frozenset(needed) - process.variables) for process in readable}
    lacking = [process for process in readable if missing[process]]
    if not lacking:
        return Check(
            _NAME, "ok", f"{len(processes)} processes; {len(readable)} show their environment, with all variables"
        )
    names = sorted({name for process in lacking for name in missing[process]})
    who = _some([f"{process.title} ({process.pid})" for process in lacking])
    detail = f"{len(lacking)} of {len(readable)} processes lack {_some(names)}: {who}"
    return Check(_NAME, "failed", detail, "stop this Ray and start it by `kvray serve`, or with these variables set")


def _split(file: Path) -> list[str]:
    return file.read_bytes().decode(errors="replace").split("\0")


def _variables(folder: Path) -> frozenset[str]:
    """Names. None when the first entry is no variable: a title that the process set lies over this one and more."""
    entries = _split(folder / "environ")
    return frozenset(entry.partition("=")[0] for entry in entries if "=" in entry) if "=" in entries[0] else frozenset()


def _is_ray(arguments: Sequence[str]) -> bool:
    return arguments[0].startswith("ray::") or any(place in part for part in arguments[:4] for place in _PLACES)


def _title(arguments: Sequence[str]) -> str:
    """ray::ServeReplica:..., or the file name of the program or script."""
    if arguments[0].startswith("ray::"):
        return arguments[0].strip()
    path = next(part for part in arguments if any(place in part for place in _PLACES))
    return Path(path).name


def _some(words: Sequence[str]) -> str:
    return ", ".join(words[:_SHOWN]) + (f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else "")
