"""exclusive_port, by Serve's own way of starting a front door's gRPC server, on real ports."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from ray.serve._private import grpc_util
from ray.serve.config import gRPCOptions

from cluster.free_ports import free_ports
from router import exclusive_port

SERVER = grpc_util.gRPCGenericServer


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_util, "gRPCGenericServer", SERVER)

    def on_this_machine(server: Any, address: str) -> None:
        server.add_insecure_port(address.replace("[::]", "127.0.0.1"))

    monkeypatch.setattr("ray.serve._private.default_impl.add_grpc_address", on_this_machine)


async def start_twice(*, share: bool = False) -> None:
    """Two servers on one port, as two clusters on one machine start them."""
    (port,) = free_ports(1)
    servers = []
    try:
        for _ in range(2):
            task, server = await grpc_util.start_grpc_server(
                lambda **about: None,
                gRPCOptions(port=port, grpc_servicer_functions=[]),
                event_loop=asyncio.get_running_loop(),
                enable_so_reuseport=share,
            )
            servers.append((task, server))
    finally:
        for task, server in servers:
            await server.stop(None)
            await task


def test_serve_itself_lets_two_servers_have_one_port() -> None:
    asyncio.run(start_twice())  # when this raises, Ray has mended it and exclusive_port can go


def test_a_port_that_is_taken_is_refused_so_that_serve_tries_the_next() -> None:
    exclusive_port.install()
    with pytest.raises(RuntimeError, match="Failed to bind"):  # the error that Serve's own retry waits for
        asyncio.run(start_twice())


def test_servers_that_ask_to_share_still_do() -> None:
    exclusive_port.install()
    asyncio.run(start_twice(share=True))


def test_installing_again_changes_nothing() -> None:
    exclusive_port.install()
    installed = grpc_util.gRPCGenericServer
    exclusive_port.install()
    assert grpc_util.gRPCGenericServer is installed


def test_another_ray_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Other:
        def __init__(self, options: list[Any]) -> None: ...

    monkeypatch.setattr(grpc_util, "gRPCGenericServer", Other)
    with caplog.at_level(logging.WARNING):
        exclusive_port.install()
    assert grpc_util.gRPCGenericServer is Other
    assert "not as expected" in caplog.text
