"""RequestMetrics through a front door: every request ends once, as a success or with its error's code."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from fake_dispatcher import HANG, Attempt, DoorWorld, Step, answer, delta
from fake_metrics import FakeMetrics

from cluster.core.errors import InvalidRequest, KvrayError, ReplicaLost
from cluster.core.request import FinishReason
from router.generation import GenerationCall

TTFT = "kvray_time_to_first_token_seconds"
WHOLE = "kvray_e2e_request_latency_seconds"
PER_TOKEN = "kvray_request_time_per_output_token_seconds"


class Ticks:
    """A clock that is one second later at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def world(*steps: Step) -> tuple[DoorWorld, FakeMetrics]:
    tools = FakeMetrics()
    return DoorWorld([Attempt("a", list(steps))], metric_tools=tools, clock=Ticks()), tools


async def run(door: DoorWorld, **call: object) -> None:
    async for _ in door.door.generate(GenerationCall(text="hello", **call)):  # type: ignore[arg-type]
        pass


async def test_an_answer_has_its_times_and_its_end() -> None:
    door, tools = world(*answer("abcd"))
    await run(door)
    assert tools.counters["kvray_request_success"] == {(("finished_reason", "length"),): 1}
    assert tools.counters["kvray_request_failure"] == {}
    (ttft,), (whole,), (per_token,) = (tools.observed[name] for name in (TTFT, WHOLE, PER_TOKEN))
    assert 0 < ttft < whole
    assert per_token == pytest.approx((whole - ttft) / 3)


async def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    door, tools = world(*answer("a"))
    await run(door)
    assert (len(tools.observed[TTFT]), len(tools.observed[WHOLE]), tools.observed[PER_TOKEN]) == (1, 1, [])


@pytest.mark.parametrize(
    ("error", "code"), [(ReplicaLost("it died"), "replica_lost"), (ValueError("a bug"), "internal")]
)
async def test_an_error_counts_under_its_code(error: Exception, code: str) -> None:
    door, tools = world(delta("a"), error)
    with pytest.raises(type(error)):
        await run(door)
    assert tools.counters["kvray_request_failure"] == {(("code", code),): 1}
    assert tools.counters["kvray_request_success"] == {}
    assert len(tools.observed[TTFT]) == 1, "its first token came"
    assert tools.observed[WHOLE] == []


async def test_a_request_that_never_reached_a_replica_counts() -> None:
    door, tools = world()
    with pytest.raises(InvalidRequest):
        await run(door, sampling={"n": "many"})
    with pytest.raises(KvrayError):
        await run(door, model="another")
    assert tools.counters["kvray_request_failure"] == {
        (("code", "invalid_request"),): 1,
        (("code", "model_not_found"),): 1,
    }


async def test_a_client_that_leaves_is_a_cancelled_request() -> None:
    door, tools = world(delta("a"), HANG)
    async with aclosing(door.door.generate(GenerationCall(text="hello"))) as events:
        await anext(events)
    assert tools.counters["kvray_request_failure"] == {(("code", "cancelled"),): 1}


async def test_a_cancelled_task_is_a_cancelled_request() -> None:
    door, tools = world(HANG)
    task = asyncio.create_task(run(door))
    while not door.dispatcher.used:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tools.counters["kvray_request_failure"] == {(("code", "cancelled"),): 1}


async def test_leaving_after_the_last_event_is_no_failure() -> None:
    door, tools = world(*answer("ab", FinishReason.STOP))
    async with aclosing(door.door.generate(GenerationCall(text="hello"))) as events:
        async for event in events:
            if event.finish_reason is not None:
                break
    assert tools.counters["kvray_request_success"] == {(("finished_reason", "stop"),): 1}
    assert tools.counters["kvray_request_failure"] == {}
