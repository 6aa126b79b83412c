"""BenchOptions: what `kvray bench` was asked to do, checked.

Owns: reading NAME=VALUE options and refusing what cannot work before anything starts.
Does not: start or ask anything.
Invariants: every peer has a name of its own; a pid belongs to a named peer; every problem is a ConfigError of one line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from cluster.bench.workloads import Workload, choose
from cluster.config import EngineConfig
from cluster.core.errors import ConfigError

SERVED = "kvray"
ENGINE = "engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """peers: (name, url) pairs.  engine_config: of the engine alone and of the served replica."""

    peers: tuple[tuple[str, str], ...]
    pids: dict[str, int]
    workloads: tuple[Workload, ...]
    engine_config: EngineConfig
    serve: bool = False
    engine: bool = False
    repetitions: int = 3
    max_noise: float = 0.12
    quiet_wait_s: float = 25.0
    retries: int = 1
    time_limit_s: float | None = None
    background_load: float | None = None
    json: Path | None = None
    png: Path | None = None
    markdown: Path | None = None

    @property
    def serve_options(self) -> list[str]:
        """For `kvray serve`, so that the served replica and the engine alone are set up alike."""
        config = self.engine_config
        return [
            *("--model", config.model, "--threads", str(config.threads), "--dtype", config.dtype),
            *(("--kv-memory", str(config.cache.kv_memory)) if config.cache.kv_memory else ()),
        ]


def read_options(given: Mapping[str, Any]) -> BenchOptions:
    """From the command's parameters by name."""
    peers = read_peers(given["peer"] or (), serve=given["serve"], engine=given["engine"])
    outputs = {name: given[name] for name in ("json", "png", "markdown")}
    for path in outputs.values():
        # Before hours of runs, not after.
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} cannot be written: its folder does not exist")
    load = given["background_load"]
    if load is not None and not 0 < load <= 1:
        raise ConfigError(f"--background-load: {load:g} is no share of the CPU time; write for example 0.6")
    return BenchOptions(
        peers=peers,
        pids=read_pids(given["pid"] or (), peers),
        workloads=tuple(choose(given["workloads"])),
        engine_config=_engine_config(given),
        serve=given["serve"],
        engine=given["engine"],
        repetitions=given["reps"],
        max_noise=given["max_noise"],
        quiet_wait_s=given["quiet_wait"],
        retries=given["retries"],
        time_limit_s=given["time_limit"],
        background_load=load,
        **outputs,
    )


def _engine_config(given: Mapping[str, Any]) -> EngineConfig:
    values = {name: given[name] for name in ("model", "threads", "dtype")}
    try:
        return EngineConfig.model_validate({**values, "cache": {"kv_memory": given["kv_memory"]}})
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][-1]).replace("_", "-")
        raise ConfigError(f"--{name}: {problem['msg'].removeprefix('Value error, ')}") from None


def read_peers(given: Sequence[str], *, serve: bool, engine: bool) -> tuple[tuple[str, str], ...]:
    peers = [_pair(text, "--peer", "NAME=URL") for text in given]
    for _, url in peers:
        address = urlsplit(url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ConfigError(f"--peer: {url!r} is no address; write for example http://127.0.0.1:8000")
    names = [name for name, _ in peers] + [SERVED] * serve + [ENGINE] * engine
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--peer: two peers are called {twice!r}")
    if not names:
        raise ConfigError("nothing to run against: give --peer NAME=URL, --serve or --engine")
    return tuple(peers)


def read_pids(given: Sequence[str], peers: Sequence[tuple[str, str]]) -> dict[str, int]:
    pids = {}
    for text in given:
        name, pid = _pair(text, "--pid", "NAME=PID")
        if name not in dict(peers):
            known = ", ".join(name for name, _ in peers) or "none"
            raise ConfigError(f"--pid: no peer is called {name!r}; there are: {known}")
        if not pid.isdigit() or not _is_alive(int(pid)):
            raise ConfigError(f"--pid: {pid!r} is no running process")
        pids[name] = int(pid)
    return pids


def _pair(text: str, option: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ConfigError(f"{option}: {text!r} is not {form}")
    return name, value


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
