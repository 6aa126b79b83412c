"""Attempts: every engine is told what is left of the deadline, and none is asked when nothing is.

How refusals and deaths are routed again is in test_front_door.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import pytest

from cluster.core.errors import DeadlineExceeded, KvrayError, Overloaded, ReplicaLost
from cluster.core.replica import WorkerId
from cluster.core.request import FinishReason, GenerationRequest, TokenDelta
from cluster.core.sampling import SamplingParams
from router.attempts import Attempts
from router.deadline import Deadline
from router.routing_state import RouteHint

REQUEST = GenerationRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(), priority=-3)
HINT = RouteHint(request_id="r", chunk_hashes=(), prompt_tokens=2)
DONE = TokenDelta("r", (7,), finish_reason=FinishReason.STOP)


def refusal(worker: str) -> Overloaded:
    return Overloaded("the queue is full", retry_after_s=12.3, worker_id=worker)


class SlowDispatcher:
    """Attempt after attempt: takes some seconds of virtual time, then answers or fails."""

    def __init__(self, script: Sequence[tuple[float, KvrayError | TokenDelta]]) -> None:
        self.now = 50.0
        self.asked: list[GenerationRequest] = []
        self._script = list(script)

    def clock(self) -> float:
        return self.now

    async def dispatch(
        self, request: GenerationRequest, hint: RouteHint, *, whole: bool = False
    ) -> AsyncGenerator[tuple[WorkerId, TokenDelta], None]:
        self.asked.append(request)
        seconds, outcome = self._script.pop(0)
        self.now += seconds
        if isinstance(outcome, KvrayError):
            raise outcome
        yield WorkerId("w"), outcome

    async def run(self, timeout_s: float | None) -> list[TokenDelta]:
        deltas = Attempts(self).deltas(REQUEST, HINT, Deadline(timeout_s, self.clock))
        return [delta async for _, delta in deltas]


async def test_every_attempt_is_told_what_is_left() -> None:
    world = SlowDispatcher([(1.5, refusal("a")), (4, ReplicaLost("died", worker_id="b")), (100, DONE)])
    assert await world.run(10) == [DONE]
    assert [request.timeout_s for request in world.asked] == [10, 8.5, 4.5]
    assert {request.priority for request in world.asked} == {-3}


async def test_without_a_deadline_the_engines_have_none() -> None:
    world = SlowDispatcher([(1e6, refusal("a")), (1e6, DONE)])
    assert await world.run(None) == [DONE]
    assert [request.timeout_s for request in world.asked] == [None, None]


@pytest.mark.parametrize("error", [refusal("a"), ReplicaLost("died", worker_id="a")], ids=["refused", "died"])
async def test_no_other_replica_is_asked_once_the_deadline_has_passed(error: KvrayError) -> None:
    world = SlowDispatcher([(10, error), (0, DONE)])
    with pytest.raises(DeadlineExceeded, match="the deadline of 10 s passed"):
        await world.run(10)
    assert len(world.asked) == 1


async def test_a_deadline_that_has_passed_costs_no_dispatch() -> None:
    world = SlowDispatcher([])
    with pytest.raises(DeadlineExceeded):
        await world.run(0)
    assert world.asked == []


async def test_an_engine_that_gave_up_is_not_followed_by_another() -> None:
    world = SlowDispatcher([(1, DeadlineExceeded("too late")), (0, DONE)])
    with pytest.raises(DeadlineExceeded):
        await world.run(10)
    assert len(world.asked) == 1
