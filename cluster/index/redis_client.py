"""How the index talks to Redis: one client with our timeouts, our scripts, and one kind of error.

Owns: the client's settings, loading the Lua scripts, translating every Redis error to `IndexUnavailable`.
Does not: retry; who calls knows whether a call may be made twice.
Invariants: no call waits longer than the timeout for an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from cluster.index.base import IndexUnavailable


def connect(url: str, timeout_s: float) -> Redis:
    """A client for a redis://, rediss:// or unix:// URL. Opens no connection yet."""
    client: Redis = Redis.from_url(
        url,
        protocol=2,
        decode_responses=False,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )
    return client


def load_script(client: Redis, name: str) -> AsyncScript:
    """The script `scripts/<name>.lua`; it loads itself again into a server that lost it."""
    return client.register_script(files("cluster.index").joinpath("scripts", f"{name}.lua").read_text())


@contextmanager
def unavailable_on_error(what: str) -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        raise IndexUnavailable(f"Redis cannot {what}: {error or type(error).__name__}") from error
