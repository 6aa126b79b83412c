"""A request that finds no replica at all: it waits for one, but not for ever. The rest is in test_token_channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, cast

import pytest
from ray.serve.handle import DeploymentHandle
from virtual_loop import VirtualLoop

from cluster.core.errors import NoReplica
from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from router.attempts import Attempts
from router.deadline import Deadline
from router.prefix_router import TICKET_KEYWORD
from router.route_hint import RouteHint, RouteTicket
from router.route_ledger import RouteLedger
from router.serve_dispatcher import ServeDispatcher
from router.token_channels import TokenChannels

START_WAIT_S = 60.0


class Handle:
    """Of a deployment whose calls wait for a replica, until they are cancelled."""

    def __init__(self) -> None:
        self.tickets: list[RouteTicket] = []
        self.cancelled = 0

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, payload: bytes, **keywords: Any) -> Handle:
        self.tickets.append(keywords[TICKET_KEYWORD])
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""


async def ask(handle: Handle) -> None:
    dispatcher = ServeDispatcher(cast(DeploymentHandle, handle), RouteLedger(), TokenChannels("me"), START_WAIT_S)
    request = GenerationRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(), router_id="me")
    hint = RouteHint(request_id="r", chunk_hashes=(), prompt_tokens=2)
    clock = asyncio.get_running_loop().time
    async for _ in Attempts(dispatcher).deltas(request, hint, Deadline(None, clock)):
        pass


def in_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)


def test_without_any_replica_it_ends_once_the_wait_is_over_and_is_not_sent_again() -> None:
    handle = Handle()

    async def run() -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        with pytest.raises(NoReplica, match="within 60 s"):
            await ask(handle)
        assert clock() - began == START_WAIT_S

    in_virtual_time(run())
    assert (len(handle.tickets), handle.cancelled) == (1, 1)
    assert not handle.tickets[0].open


def test_one_that_has_been_placed_waits_for_its_answer_as_long_as_that_takes() -> None:
    handle = Handle()

    async def run() -> None:
        waiting = asyncio.create_task(ask(handle))
        await asyncio.sleep(START_WAIT_S / 2)
        handle.tickets[0].placed = True
        await asyncio.sleep(100 * START_WAIT_S)
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    in_virtual_time(run())
    assert handle.cancelled == 1
