"""MessageSocket over a real socketpair: every message survives it, and every end of the other side reads as None."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from cluster.core.errors import KvrayError, Overloaded, ReplicaLost, RequestTooLong
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import ReplicaLoad
from cluster.core.request import FinishReason, GenerationRequest, TokenDelta
from cluster.core.sampling import SamplingParams
from worker.engine_wire import MessageSocket
from worker.frame import EngineCommand, EngineFrame
from worker.runner import ModelFacts

REQUEST = GenerationRequest(
    request_id="a",
    prompt_token_ids=(0, 1, 127, 128, 65_535, 151_935),
    sampling=SamplingParams(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        seed=-(2**63),
        max_tokens=3,
        stop=("\n\n", "é"),
        stop_token_ids=(7, 8),
        ignore_eos=True,
    ),
    router_id="router",
    cache_salt="salt",
)
LOAD = ReplicaLoad(waiting=1, running=2, uncached_tokens={"r": 9}, free_blocks=3, total_blocks=8, step_time_s=0.25)
FACTS = ModelFacts(
    model="m",
    vocab_size=96,
    max_model_len=512,
    eos_token_ids=(2, 3),
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    dtype="float32",
    device="cpu",
    attention="reference",
    weight_bytes=2**40,
    kv_bytes_per_token=384,
    num_blocks=64,
    block_size=16,
    model_revision="rev",
    kv_fingerprint="print",
)
HASHES = (ChunkHash(bytes(range(16))), ChunkHash(b"\xff" * 16))


class Pair:
    """Both ends; `raw` is the peer's bare socket, for bytes that no MessageSocket would write."""

    def __init__(self) -> None:
        ours, self.raw = socket.socketpair()
        self.ours = MessageSocket(ours)
        self.peer = MessageSocket(self.raw)

    def through(self, message: Any) -> Any:
        assert self.peer.write(message)
        messages = self.ours.read(wait=True)
        assert messages is not None and len(messages) == 1
        return messages[0]


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.ours.close()
    pair.peer.close()


@pytest.mark.parametrize(
    "command",
    [
        EngineCommand(add=REQUEST),
        EngineCommand(
            add=GenerationRequest(request_id="b", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=None))
        ),
        EngineCommand(cancel="a"),
    ],
    ids=["add", "add-defaults", "cancel"],
)
def test_commands(pair: Pair, command: EngineCommand) -> None:
    assert EngineCommand.from_wire(pair.through(command.to_wire())) == command


def test_frames(pair: Pair) -> None:
    frame = EngineFrame(
        deltas=(
            TokenDelta(request_id="a", token_ids=(5,), cached_tokens=0),
            TokenDelta(request_id="b", token_ids=(6, 7), cached_tokens=32, finish_reason=FinishReason.STOP),
            TokenDelta(request_id="c", finish_reason=FinishReason.CANCELLED),
        ),
        events=(
            CacheEvent(CacheEventKind.CLEARED),
            CacheEvent(CacheEventKind.STORED, HASHES),
            CacheEvent(CacheEventKind.REMOVED, HASHES[:1]),
        ),
        load=LOAD,
    )
    back = EngineFrame.from_wire(pair.through(frame.to_wire()), ReplicaLoad())
    assert back == frame
    assert [type(e.kind) for e in back.events] == [CacheEventKind] * 3
    assert [d.last for d in back.deltas] == [False, True, True]


@pytest.mark.parametrize(
    "error",
    [
        RequestTooLong("prompt", "too long", limit=32),
        Overloaded("the queue is full", retry_after_s=2.5),
        ReplicaLost("gone", tokens=3),
    ],
    ids=lambda e: type(e).__name__,
)
def test_errors_in_deltas_keep_type_and_details(pair: Pair, error: KvrayError) -> None:
    frame = EngineFrame((TokenDelta(request_id="a", error=error),), (), ReplicaLoad())
    back = EngineFrame.from_wire(pair.through(frame.to_wire()), ReplicaLoad()).deltas[0].error
    assert type(back) is type(error)
    assert (str(back), back.details) == (error.message, error.details)


def test_facts(pair: Pair) -> None:
    assert ModelFacts.from_wire(pair.through({"facts": FACTS.to_wire()})["facts"]) == FACTS


def test_messages_arrive_whole_and_in_order_however_the_bytes_are_cut(pair: Pair) -> None:
    messages = [EngineCommand(cancel=str(n)).to_wire() for n in range(20)] + [["x" * 3_000_000, 1]]
    data = b"".join(msgpack.packb(m) for m in messages)

    def write() -> None:
        for start in range(0, 700, 7):
            pair.raw.sendall(data[start : start + 7])
        pair.raw.sendall(data[700:])

    writer = threading.Thread(target=write)
    writer.start()
    got: list[Any] = []
    while len(got) < len(messages):
        part = pair.ours.read(wait=True)
        assert part, "with wait, there is at least one message"
        got += part
    writer.join()
    assert got == messages


def test_without_wait_nothing_and_half_a_message_are_an_empty_list(pair: Pair) -> None:
    assert pair.ours.read(wait=False) == []
    data = msgpack.packb([None, "abc"])
    pair.raw.sendall(data[:3])
    assert pair.ours.read(wait=False) == []
    pair.raw.sendall(data[3:])
    assert pair.ours.read(wait=False) == [[None, "abc"]]


def test_what_came_before_the_end_is_still_delivered(pair: Pair) -> None:
    pair.peer.write([None, "a"])
    pair.raw.sendall(msgpack.packb([None, "abc"])[:3])  # and a message that its writer did not live to finish
    pair.peer.close()
    assert pair.ours.read(wait=True) == [[None, "a"]]
    assert pair.ours.read(wait=True) is None
    assert pair.ours.read(wait=False) is None


def test_writing_to_a_closed_peer_says_so(pair: Pair) -> None:
    pair.peer.close()
    assert pair.ours.write([1]) is False


@pytest.mark.parametrize("wait", [True, False])
def test_reading_after_the_own_end_was_closed_is_an_end_too(pair: Pair, wait: bool) -> None:
    """The reader's thread may be between two calls when another thread closes."""
    pair.ours.close()
    pair.ours.close()
    assert pair.ours.read(wait=wait) is None
    assert pair.ours.write([1]) is False


def test_close_wakes_a_reader_in_another_thread(pair: Pair) -> None:
    results: list[object] = []
    begun = threading.Event()

    def read() -> None:
        begun.set()
        results.append(pair.ours.read(wait=True))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    begun.wait()
    time.sleep(0.1)  # by now it blocks; if not, the test is only less sharp
    pair.ours.close()
    reader.join(10)
    assert results == [None]


def test_a_frame_with_a_reason_nobody_knows_is_refused() -> None:
    wire = TokenDelta(request_id="a", finish_reason=FinishReason.STOP).to_wire()
    wire[wire.index("stop")] = "tired"
    with pytest.raises(ValueError, match="tired"):
        EngineFrame.from_wire([[wire], [], ReplicaLoad().to_wire()], ReplicaLoad())


def test_a_command_with_a_value_out_of_range_raises_the_typed_error() -> None:
    wire = EngineCommand(add=REQUEST).to_wire()
    wire[0]["sampling"]["temperature"] = -1.0
    with pytest.raises(KvrayError) as caught:
        EngineCommand.from_wire(wire)
    assert caught.value.details == {"field": "temperature"}
