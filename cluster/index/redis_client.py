"""How the index talks to Redis: one client with our timeouts, our scripts, and one kind of error.

Owns: the client's settings for one server, Sentinels or a cluster, loading the Lua scripts, and translating every
Redis error to `IndexUnavailable`.
Does not: retry; who calls knows whether a call may be made twice. Does not read URLs (cluster.index.redis_url).
Invariants: no call waits longer than the timeout for an answer of one server.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any, cast

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from cluster.core.errors import ConfigError
from cluster.index.base import IndexUnavailable
from cluster.index.redis_url import RedisMode, RedisTarget, parse_redis_url

_LONGEST_ERROR = 300
_CLUSTER_RETRIES = 1  # after the map of the slots was read anew; moved keys are followed without


def connect(url: str, timeout_s: float) -> Redis:
    """A client for any URL of cluster.index.redis_url. Opens no connection yet. ConfigError for a bad URL."""
    target = parse_redis_url(url)
    if target.mode is RedisMode.SENTINEL:
        return _behind_sentinels(target, timeout_s)
    if target.mode is RedisMode.CLUSTER:
        return connect_cluster(target, timeout_s)
    options = connection_options(target, timeout_s)
    if target.unix_path:
        options = {**options, "path": target.unix_path, "connection_class": UnixDomainSocketConnection}
    else:
        host, port = target.hosts[0]
        options = {**options, "host": host, "port": port}
        if target.tls is not None:
            options["connection_class"] = SSLConnection
    client: Redis = Redis.from_pool(ConnectionPool(**options, db=target.db))
    return client


def connect_cluster(target: RedisTarget, timeout_s: float) -> Redis:
    """A client of the whole cluster. It takes the commands of a `Redis`, of which the index uses only those that name
    keys; all of a model's keys are in one slot."""
    options = connection_options(target, timeout_s)
    options["ssl"] = target.tls is not None
    options["retry"] = Retry(NoBackoff(), _CLUSTER_RETRIES)
    nodes = [ClusterNode(host, port) for host, port in target.hosts]
    return cast(Redis, RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options))


def connection_options(target: RedisTarget, timeout_s: float) -> dict[str, Any]:
    """What a connection to any server of the target is opened with, but for the address."""
    _check_tls_files(target)
    return {
        "username": target.username,
        "password": target.password,
        "protocol": 2,
        "decode_responses": False,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        **(target.tls or {}),
    }


async def close(client: Redis) -> None:
    """Close the client, and those that ask the Sentinels for it."""
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    await client.aclose()
    for sentinel in [] if manager is None else manager.sentinels:
        await sentinel.aclose()


def load_script(client: Redis, name: str) -> AsyncScript:
    """The script `scripts/<name>.lua`; it loads itself again into a server that lost it."""
    return client.register_script(files("cluster.index").joinpath("scripts", f"{name}.lua").read_text())


@contextmanager
def unavailable_on_error(what: str) -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        reason = str(error)[:_LONGEST_ERROR] or type(error).__name__
        raise IndexUnavailable(f"Redis cannot {what}: {reason}") from error


def _behind_sentinels(target: RedisTarget, timeout_s: float) -> Redis:
    options = connection_options(target, timeout_s)
    options["ssl"] = target.tls is not None
    for_sentinels = {**options, "username": target.sentinel_username, "password": target.sentinel_password}
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        target.hosts, sentinel_kwargs=for_sentinels, **options, db=target.db
    )
    client: Redis = sentinel.master_for(target.service)
    return client


def _check_tls_files(target: RedisTarget) -> None:
    """A wrong path would otherwise look like a server that is away, and be tried again for ever."""
    tls = target.tls or {}
    try:
        context = ssl.create_default_context(cafile=tls.get("ssl_ca_certs"))
        if "ssl_certfile" in tls:
            context.load_cert_chain(tls["ssl_certfile"], tls.get("ssl_keyfile"))
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"the TLS files in the Redis URL cannot be used: {error}") from error
