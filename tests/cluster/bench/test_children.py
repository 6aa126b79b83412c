"""The engine's and the server's child processes: lines there and back, failures of one line, and their end."""

from __future__ import annotations

import asyncio
import sys

import pytest

from cluster.bench.engine_peer import EnginePeer
from cluster.bench.http_peer import open_http
from cluster.bench.machine_probe import MachineProbe
from cluster.bench.model_costs import ModelCosts
from cluster.bench.served_cluster import ServedCluster
from cluster.core.errors import ConfigError, KvrayError

# Echoes; a prompt of "fail" fails, "die" ends the process, and "wait" is answered only when it is cancelled.
ENGINE = """
import json, sys
def say(**message):
    print(json.dumps(message), flush=True)
say(ready=True)
for line in sys.stdin:
    request = json.loads(line)
    if "cancel" in request:
        say(id=request["cancel"] + 1, error="the other one was cancelled")
    elif request["prompt"] == "fail":
        say(id=request["id"], error="no room")
    elif request["prompt"] == "die":
        sys.exit(3)
    elif request["prompt"] != "wait":
        say(id=request["id"], answer=dict(text=request["prompt"], first_s=1, last_s=2, end_s=3,
            prompt_tokens=4, answer_tokens=request["max_tokens"], cached_tokens=None))
"""


async def launch(code: str) -> EnginePeer:
    return await EnginePeer.launch((sys.executable, "-c", code), "tiny", timeout_s=30)


async def test_answers_find_their_requests() -> None:
    engine = await launch(ENGINE)
    assert engine.facts.start_s is not None and engine.facts.start_s > 0
    answers = await asyncio.gather(*(engine.complete(f"p{n}", n, caching=True) for n in range(5)))
    assert [(answer.text, answer.answer_tokens) for answer in answers] == [(f"p{n}", n) for n in range(5)]
    with pytest.raises(KvrayError, match="no room"):
        await engine.complete("fail", 1, caching=True)
    await engine.stop()


async def test_a_request_that_is_given_up_is_cancelled() -> None:
    engine = await launch(ENGINE)
    given_up = asyncio.create_task(engine.complete("wait", 1, caching=True))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(engine.complete("wait", 1, caching=True))
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(KvrayError, match="the other one was cancelled"):
        await waiting
    await engine.stop()


async def test_requests_of_an_engine_that_died_fail() -> None:
    engine = await launch(ENGINE)
    waiting = asyncio.create_task(engine.complete("wait", 1, caching=True))
    await asyncio.sleep(0)
    for prompt in ("die", "too late"):
        with pytest.raises(KvrayError, match="process has ended"):
            await engine.complete(prompt, 1, caching=True)
    with pytest.raises(KvrayError, match="process has ended"):
        await waiting
    await engine.stop()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ('print(\'{"failed": "no weights"}\')', "the engine did not start: no weights"),
        ("raise SystemExit(5)", "the engine did not start: its process ended with 5"),
    ],
)
async def test_an_engine_that_does_not_start_says_why(code: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await launch(code)


async def test_a_server_that_does_not_start_says_why() -> None:
    cluster = ServedCluster(["--threads", "0"])
    async with open_http(30) as http:
        with pytest.raises(ConfigError, match="kvray serve did not start: kvray: --threads: "):
            await cluster.start(http)
    await cluster.stop()


COSTS = ModelCosts(dtype="bfloat16", layers=1, layer_weights=30, head_weights=20, attention_width=8)
LIMITS = """
import json, sys
print("a library says hello")
print(json.dumps({"bandwidth": int(sys.argv[1]), "gemm_rate": int(sys.argv[3]), "dtype": sys.argv[2]}))
"""


def probe(code: str, costs: ModelCosts | None = COSTS) -> MachineProbe:
    return MachineProbe(costs, 2, command=(sys.executable, "-c", code))


async def test_limits_are_read_again_each_time() -> None:
    limits = probe(LIMITS)
    await limits.read()
    await limits.read()
    assert len(limits.readings) == 2
    assert (limits.bandwidth, limits.gemm_rate, limits.missing) == (100, 2, "")


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ('print(\'{"missing": "No module"}\')', "No module"),
        ("raise SystemExit(1)", "the measurement failed"),
        ("print('no object')", "the measurement failed"),
    ],
)
async def test_limits_that_cannot_be_read_are_not_tried_again(code: str, missing: str) -> None:
    limits = probe(code)
    await limits.read()
    limits.command = (sys.executable, "-c", LIMITS)
    await limits.read()
    assert (limits.readings, limits.bandwidth, limits.missing) == ([], None, missing)


async def test_limits_of_another_kind_of_model_are_not_read() -> None:
    limits = probe(LIMITS, costs=None)
    await limits.read()
    assert limits.missing == "the model is no plain decoder"
