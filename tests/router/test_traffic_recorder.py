"""TrafficRecorder: who listens is told of what ends, under a key of its own; nobody is held up by a slow reader."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_dispatcher import CHUNK_TOKENS, Attempt, DoorWorld, answer

from cluster.bench.record_command import run_record
from cluster.core.errors import ConfigError, Overloaded, ReplicaLost
from cluster.core.hashing import ChunkHash, RouteScheme, hash_prompt, root_hash
from cluster.rpc import inference_pb2_grpc as pb_grpc
from cluster.simulate.ideal_hits import ideal_hits
from cluster.simulate.recorded_trace import read_requests
from router import traffic_recorder
from router.generation import GenerationCall
from router.grpc_api import GrpcApi
from router.traffic_recorder import MAX_LISTENERS, MAX_QUEUED, TrafficRecorder

ROOT = root_hash(RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=2))
HASHES = tuple(hash_prompt(ROOT, [1, 2, 3, 4], 2))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_listener_hears_what_came_after_it_and_had_an_answer() -> None:
    clock = Clock()
    recorder = TrafficRecorder(2, clock)
    recorder.ended(99.0, 5, 7, HASHES)  # nobody listens
    with recorder.listen() as listener:
        recorder.ended(99.0, 5, 7, HASHES)  # came before
        recorder.ended(101.5, 5, 0, HASHES)  # no answer
        recorder.ended(102.5, 5, 7, HASHES)
        (one,) = await listener.next(1.0)
        assert (one.arrived_s, one.prompt_tokens, one.output_tokens, len(one.chunks)) == (2.5, 5, 7, 2)
        assert listener.missed == 1
        assert await listener.next(0.0) == []
    recorder.ended(103.0, 5, 7, HASHES)
    assert await listener.next(0.0) == []


async def test_numbers_are_equal_within_a_recording_only_and_are_not_the_hashes() -> None:
    recorder = TrafficRecorder(2, Clock())
    with recorder.listen() as one, recorder.listen() as other:
        for _ in range(2):
            recorder.ended(101.0, 5, 7, HASHES)
        mine, again = await one.next(1.0)
        theirs, _ = await other.next(1.0)
    assert mine.chunks == again.chunks and len(set(mine.chunks)) == 2
    assert not set(mine.chunks) & set(theirs.chunks)
    assert not {number.to_bytes(8, "little") for number in mine.chunks} & {chunk[:8] for chunk in HASHES}


async def test_a_slow_reader_loses_requests_and_takes_them_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TrafficRecorder(2, Clock())
    with recorder.listen() as listener:
        for _ in range(MAX_QUEUED + 5):
            recorder.ended(101.0, 5, 7, HASHES)
        assert listener.missed == 5
        told = [len(await listener.next(0.0)) for _ in range(3)]
    assert told == [2048, 2048, 0]
    monkeypatch.setattr(traffic_recorder, "MAX_QUEUED_CHUNKS", 3)
    with recorder.listen() as listener:
        for _ in range(4):
            recorder.ended(101.0, 5, 7, HASHES)
        assert (listener.missed, len(await listener.next(0.0))) == (2, 2)
        recorder.ended(101.0, 5, 7, HASHES)
        assert (listener.missed, len(await listener.next(0.0))) == (2, 1)


def test_listeners_are_few() -> None:
    recorder = TrafficRecorder(2, Clock())
    open_ones = [recorder.listen() for _ in range(MAX_LISTENERS)]
    for one in open_ones:
        one.__enter__()
    with pytest.raises(Overloaded), recorder.listen():
        pass
    open_ones[0].__exit__(None, None, None)
    with recorder.listen():
        pass


async def test_the_front_door_tells_of_every_answer() -> None:
    clock = Clock()
    world = DoorWorld([Attempt("a", answer("Hello")), Attempt("a", answer("xyz"))], clock=clock)
    with world.door.recorder.listen() as listener:
        clock.now += 3.0
        async for _ in world.door.generate(GenerationCall(text="123456789")):
            clock.now += 0.5
        early = world.door.generate(GenerationCall(text="1234"))
        await anext(early)
        await early.aclose()  # the client goes
        whole, part = await listener.next(1.0)
    assert (whole.arrived_s, whole.prompt_tokens, whole.output_tokens) == (3.0, 9, 5)
    assert (part.prompt_tokens, part.output_tokens) == (4, 1)
    assert len(whole.chunks) == 9 // CHUNK_TOKENS and part.chunks == whole.chunks[:1]


class RecordingServer(pb_grpc.CacheServicer):
    """A server that has Cache.Record, and whatever a test lets end."""

    def __init__(self) -> None:
        self.recorder = TrafficRecorder(2)
        nothing: Any = None
        self._api = GrpcApi(
            nothing, nothing, ["demo"], explainer=nothing, router_id="r", recorder=self.recorder, watch_interval_s=0.01
        )

    async def Record(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async with aclosing(self._api.record(request, context)) as chunks:  # as the ingress does
            async for chunk in chunks:
                yield chunk

    async def run(self, out: Path, *, requests: int, limit: int | None, seconds: float | None = None) -> int:
        server = grpc.aio.server()
        pb_grpc.add_CacheServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        command = asyncio.ensure_future(
            asyncio.to_thread(run_record, f"127.0.0.1:{port}", out, seconds=seconds, limit=limit)
        )
        try:
            while not self.recorder.listening and not command.done():
                await asyncio.sleep(0.005)
            for number in range(requests):
                hashes: tuple[ChunkHash, ...] = HASHES if number % 2 else HASHES[:1]
                self.recorder.ended(self.recorder.clock() + number, 5, 7 + number, hashes)
            return await command
        finally:
            await server.stop(None)


async def test_the_command_writes_a_trace_that_the_simulator_reads(tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    assert await RecordingServer().run(out, requests=5, limit=4) == 0
    assert json.loads(out.read_text().splitlines()[0])["block_tokens"] == 2
    requests = read_requests(out)
    assert [request.output_tokens for request in requests] == [7, 8, 9, 10]
    assert [request.hash_ids[:2] for request in requests][1::2] == [(0, 1), (0, 1)]
    assert ideal_hits(requests) == [0, 2, 2, 4]
    with pytest.raises(ConfigError, match="are not overwritten"):
        run_record("127.0.0.1:1", out, seconds=None, limit=None)


async def test_seconds_end_a_recording_and_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    server = RecordingServer()
    assert await server.run(out, requests=0, limit=None, seconds=0.05) == 0
    assert len(out.read_text().splitlines()) == 1
    while server.recorder.listening:  # the server hears of it a moment later
        await asyncio.sleep(0.005)


def test_no_cluster_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ReplicaLost, match=r"recording from 127\.0\.0\.1:1"):
        run_record("127.0.0.1:1", tmp_path / "trace.jsonl", seconds=None, limit=None)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="cannot be written"):
        run_record("127.0.0.1:1", tmp_path / "none" / "trace.jsonl", seconds=None, limit=None)
