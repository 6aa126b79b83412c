"""RedisLink: the client that a reader or a writer uses, whatever kind of server stands behind it.

Owns: the client, the scripts, becoming a cluster's client when the server turns out to be a node of one, and the
connection that stays with one server process for as long as a scan needs.
Does not: build commands or read answers (cluster.index.redis_reader, redis_writer), or retry.
Invariants: errors leave as `IndexUnavailable`; `pinned` never goes on with another server process than it began with.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, cast

from redis.asyncio import Redis, RedisCluster
from redis.commands.core import AsyncScript
from redis.exceptions import MovedError, RedisError

from cluster.index.base import IndexUnavailable
from cluster.index.redis_client import (
    close,
    connect,
    connect_cluster,
    connection_options,
    load_script,
    unavailable_on_error,
)
from cluster.index.redis_url import RedisMode, parse_redis_url

logger = logging.getLogger(__name__)

Argument = str | bytes | int | float


class RedisLink:
    """Opens no connection before the first command. ConfigError for a bad URL."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._target = parse_redis_url(url)
        self._timeout_s = timeout_s
        self._client = connect(url, timeout_s)
        self._scripts: dict[str, AsyncScript] = {}

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    @asynccontextmanager
    async def use(self, what: str) -> AsyncIterator[Redis]:
        """The client, for commands that together do `what`."""
        try:
            with unavailable_on_error(what):
                yield self._client
        except IndexUnavailable as error:
            if isinstance(error.__cause__, MovedError) and self._target.mode is RedisMode.SINGLE:
                await self._become_cluster()
            raise

    async def run(self, what: str, script: str, keys: Sequence[str], args: Sequence[Argument] = ()) -> Any:
        """Run `scripts/<script>.lua`."""
        async with self.use(what) as client:
            return await self._script(script)(keys=keys, args=args, client=client)

    @asynccontextmanager
    async def pinned(self, what: str, key: str) -> AsyncIterator[PinnedScripts]:
        """Scripts over one connection to the server of `key`. A connection that breaks is an error, and ends it."""
        async with self.use(what) as client:
            pinned = await self._one_connection(client, key)
            try:
                yield PinnedScripts(self, pinned)
            finally:
                with suppress(RedisError, OSError):
                    await pinned.aclose()

    async def close(self) -> None:
        await close(self._client)

    def _script(self, name: str) -> AsyncScript:
        if name not in self._scripts:
            self._scripts[name] = load_script(self._client, name)
        return self._scripts[name]

    async def _one_connection(self, client: Redis, key: str) -> Redis:
        if not isinstance(client, RedisCluster):
            pinned = client.client()
            await pinned.initialize()
            return pinned
        cluster = cast(RedisCluster, client)
        await cluster.initialize()
        node = cluster.get_node_from_key(key)
        if node is None:
            raise RedisError("no node of the cluster serves the model's slot")
        options = connection_options(self._target, self._timeout_s)
        options["ssl"] = self._target.tls is not None
        return Redis(host=node.host, port=int(node.port), single_connection_client=True, **options)

    async def _become_cluster(self) -> None:
        logger.info("the Redis server is a node of a cluster: using the cluster")
        before, self._client = self._client, connect_cluster(self._target, self._timeout_s)
        self._target = replace(self._target, mode=RedisMode.CLUSTER)
        with suppress(RedisError, OSError):
            await before.aclose()


class PinnedScripts:
    """The scripts of a link over one connection."""

    def __init__(self, link: RedisLink, client: Redis) -> None:
        self._link = link
        self._client = client

    async def run(self, script: str, keys: Sequence[str], args: Sequence[Argument] = ()) -> Any:
        return await self._link._script(script)(keys=keys, args=args, client=self._client)
