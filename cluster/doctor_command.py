"""`kvray doctor`: does this machine have what kvray needs? One line per check, and what to do when it has not.

Owns: the order of the checks, the table and the JSON object.
Does not: check by itself (cluster.doctor), start anything, or load a model.
Invariants: exit code 1 when a check failed, else 0; a broken torch does not keep the other checks from running.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.config import ClusterConfig
from cluster.doctor.attention import attention_check
from cluster.doctor.check import Check
from cluster.doctor.device import device_checks, device_of
from cluster.doctor.driver import Driver, read_driver
from cluster.doctor.index_server import Ask, ask_server, index_check
from cluster.doctor.ports import Try, ports_check, try_to_bind
from cluster.doctor.ray_flags import RayProcess, needed_variables, ray_flags_check, ray_processes
from cluster.doctor.torch_build import TorchBuild, read_torch
from cluster.serve_command import hide_password

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """How each check looks at the machine."""

    driver: Callable[[], Driver | None] = read_driver
    torch: Callable[[], TorchBuild] = read_torch
    cores: Callable[[], int] = _cores
    redis: Ask = ask_server
    bind: Try = try_to_bind
    ray: Callable[[], list[RayProcess]] = ray_processes


def run_doctor(config: ClusterConfig, *, as_json: bool, probes: Probes | None = None) -> int:
    checks = examine(config, probes or Probes())
    passed = all(check.verdict != "failed" for check in checks)
    if as_json:
        print(json.dumps({"ok": passed, "checks": [asdict(check) for check in checks]}))
    else:
        _show(checks)
    return 0 if passed else 1


def examine(config: ClusterConfig, probes: Probes) -> list[Check]:
    torch, driver, ray = probes.torch(), probes.driver(), probes.ray()
    engine, serve = config.engine, config.serve
    device = device_of(engine.device, torch)
    return [
        *device_checks(engine.device, driver, torch, probes.cores()),
        attention_check(engine, device, _model_config(engine.model)),
        index_check(config.index, hide_password(config.index.redis_url or ""), ask=probes.redis),
        ports_check(serve.host, {"HTTP": serve.port, "gRPC": serve.grpc_port}, ray_runs=bool(ray), attempt=probes.bind),
        ray_flags_check(ray, needed_variables()),
    ]


def _model_config(model: str) -> dict[str, Any] | None:
    """Of a local directory; nothing is fetched."""
    try:
        found = json.loads((Path(model).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _show(checks: list[Check]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("check", "verdict", "what was found"):
        table.add_column(heading, no_wrap=heading != "what was found", overflow="fold")
    for check in checks:
        verdict = f"[{_STYLES[check.verdict]}]{check.verdict}[/]"
        advice = f"\n-> {check.advice}" if check.advice else ""
        table.add_row(check.name, verdict, Text(check.detail + advice))
    Console().print(table)
