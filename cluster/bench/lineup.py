"""Lineup: all peers of a session, the given ones connected and the others started.

Owns: the order (the engine alone, kvray, the given servers) and who is stopped at the end.
Does not: send workloads (session).
Invariants: given servers are asked first, because that is quick and may fail; what was started is on the exit stack.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp

from cluster.bench.bench_options import SERVED, BenchOptions
from cluster.bench.engine_peer import EnginePeer, engine_command
from cluster.bench.http_peer import HttpPeer, is_loopback, open_http
from cluster.bench.peer import Peer
from cluster.bench.served_cluster import ServedCluster

_REQUEST_S = 1800.0


async def assemble(
    options: BenchOptions, model_dir: Path, stack: AsyncExitStack, say: Callable[[str], None]
) -> list[Peer]:
    """ConfigError when one of them cannot be used."""
    http = await stack.enter_async_context(open_http(_REQUEST_S))
    given: list[Peer] = []
    for name, url in options.peers:
        if not is_loopback(url):
            say(f"{url} is not on this machine: its times include the network, and its noise is not seen")
        peer = HttpPeer(http, name, url, options.pids.get(name))
        await peer.connect()
        given.append(peer)
    own: list[Peer] = []
    if options.engine:
        say("starting the engine alone")
        engine = await EnginePeer.launch(engine_command(options.engine_config, model_dir), model_dir.name)
        stack.push_async_callback(engine.stop)
        own.append(engine)
    if options.serve:
        say("starting kvray serve")
        own.append(await _serve(options, http, stack))
    return own + given


async def _serve(options: BenchOptions, http: aiohttp.ClientSession, stack: AsyncExitStack) -> HttpPeer:
    cluster = ServedCluster(options.serve_options)
    stack.push_async_callback(cluster.stop)
    await cluster.start(http)
    peer = HttpPeer(http, SERVED, cluster.url, cluster.pid)
    await peer.connect()
    peer.facts = replace(peer.facts, start_s=cluster.start_s)
    return peer
