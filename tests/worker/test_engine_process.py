"""ProcessEnginePort with a real child and a tiny model: its facts, its answers, and every way it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from recording_sink import RecordingSink, tokens_of
from small_tokenizer import PADDING, save_small_model, small_tokenizer

from cluster.config import CacheConfig, EngineConfig
from cluster.core.constraint import Constraint
from cluster.core.errors import ConfigError, InvalidRequest, ReplicaLost, RequestTooLong
from cluster.core.request import FinishReason, GenerationRequest
from cluster.core.sampling import SamplingParams
from cluster.tokenizer import Tokenizer
from worker.engine_client import EngineClient
from worker.engine_factory import build_engine
from worker.engine_process import ProcessEnginePort
from worker.engine_thread import ThreadEnginePort
from worker.frame import EngineCommand

CONFIG = EngineConfig(
    dtype="float32", device="cpu", threads=1, cache=CacheConfig(kv_memory=2**20, block_size=8, chunk_tokens=16)
)
PROMPT = tuple(range(4, 24))


def request(request_id: str, max_tokens: int, salt: str = "") -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(request_id=request_id, prompt_token_ids=PROMPT, sampling=sampling, cache_salt=salt)


def add(request_id: str, max_tokens: int = 6, salt: str = "") -> EngineCommand:
    return EngineCommand(add=request(request_id, max_tokens, salt))


def gone(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


class Started:
    """A child that runs, and what it has said."""

    def __init__(self, model_dir: Path) -> None:
        self.port = ProcessEnginePort(CONFIG, str(model_dir))
        self.sink = RecordingSink()
        self.facts = self.port.start(self.sink)


@pytest.fixture(scope="module")
def started(tiny_llama_dir: Path) -> Iterator[Started]:
    """One child for the tests that leave it running."""
    started = Started(tiny_llama_dir)
    yield started
    started.port.close()


@pytest.fixture
def make_port(tiny_llama_dir: Path) -> Iterator[Callable[..., ProcessEnginePort]]:
    ports: list[ProcessEnginePort] = []

    def make(model_dir: Path = tiny_llama_dir) -> ProcessEnginePort:
        ports.append(ProcessEnginePort(CONFIG, str(model_dir)))
        return ports[-1]

    yield make
    for port in ports:
        port.close()


def test_answers_and_facts_are_those_of_an_engine_in_this_process(started: Started, tiny_llama_dir: Path) -> None:
    here, sink = ThreadEnginePort(lambda: build_engine(CONFIG, str(tiny_llama_dir))), RecordingSink()
    assert here.start(sink) == started.facts
    assert (started.facts.vocab_size, started.facts.block_size, started.facts.eos_token_ids) == (96, 8, (2,))
    assert started.sink.next_frame().load.total_blocks == started.facts.num_blocks
    for port in (here, started.port):
        port.send(add("a", 12))
    wanted, got = (s.until_last("a")["a"] for s in (sink, started.sink))
    here.close()
    assert tokens_of(got) == tokens_of(wanted)
    assert len(tokens_of(got)) == 12
    assert got[-1].finish_reason is FinishReason.LENGTH


def test_requests_run_side_by_side_and_share_their_prefix(started: Started) -> None:
    port, sink = started.port, started.sink
    port.send(add("first", salt="shared"))
    first = sink.until_last("first")["first"]
    for name in ("b", "c"):
        port.send(add(name, salt="shared"))
    later = sink.until_last("b", "c")
    assert tokens_of(first) == tokens_of(later["b"]) == tokens_of(later["c"])
    assert [first[0].cached_tokens, later["b"][0].cached_tokens] == [0, len(PROMPT) - 1]


def test_cancel_reaches_the_child(started: Started) -> None:
    port, sink = started.port, started.sink
    port.send(add("long", 480))
    while not any(d.request_id == "long" for d in sink.next_frame().deltas):
        pass
    port.send(EngineCommand(cancel="long"))
    deltas = sink.until_last("long")["long"]
    assert deltas[-1].finish_reason is FinishReason.CANCELLED


def test_a_refusal_keeps_its_type_across_the_border(started: Started) -> None:
    port, sink = started.port, started.sink
    port.send(add("huge", 5000))
    (delta,) = sink.until_last("huge")["huge"]
    assert isinstance(delta.error, RequestTooLong)
    assert (delta.error.field, delta.error.limit) == ("max_tokens", 512)


def constrained(request_id: str) -> EngineCommand:
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    constraint = Constraint.json_object()
    return EngineCommand(
        add=GenerationRequest(request_id=request_id, prompt_token_ids=PROMPT, sampling=sampling, constraint=constraint)
    )


def test_a_constrained_request_wakes_an_idle_child(make_port: Callable[..., ProcessEnginePort], tmp_path: Path) -> None:
    """Sent at once after the start, while the vocabulary is being built."""
    save_small_model(tmp_path)
    port, sink = make_port(tmp_path), RecordingSink()
    assert port.start(sink).vocab_size == small_tokenizer().get_vocab_size() + PADDING
    port.send(constrained("a"))
    deltas = sink.until_last("a")["a"]
    assert deltas[-1].error is None
    text = Tokenizer.from_dir(tmp_path).decode(tokens_of(deltas))
    assert text.startswith("{")
    if deltas[-1].finish_reason is FinishReason.STOP:
        assert isinstance(json.loads(text), dict)


def test_a_tokenizer_that_grammars_cannot_use_refuses_constraints_only(started: Started) -> None:
    port, sink = started.port, started.sink
    port.send(constrained("refused"))
    (delta,) = sink.until_last("refused")["refused"]
    assert isinstance(delta.error, InvalidRequest) and delta.error.field == "json_object"
    port.send(add("free"))
    assert len(tokens_of(sink.until_last("free")["free"])) == 6


def test_a_model_that_needs_what_we_do_not_have_says_what(
    make_port: Callable[..., ProcessEnginePort], tiny_llama_dir: Path, tmp_path: Path
) -> None:
    for file in tiny_llama_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    port, sink = make_port(tmp_path), RecordingSink()
    with pytest.raises(ConfigError, match="nonesuch"):
        port.start(sink)
    assert gone(port.pid)
    assert sink.exits.empty()


async def test_sigkill_ends_open_streams_and_closing_leaves_no_process(
    make_port: Callable[..., ProcessEnginePort],
) -> None:
    reasons: list[str] = []
    port = make_port()
    client = EngineClient(port, on_exit=reasons.append)
    await client.start()
    begun = [asyncio.Event(), asyncio.Event()]

    async def read(number: int) -> None:
        async for _ in client.generate(request(f"r{number}", 480)):
            begun[number].set()

    tasks = [asyncio.create_task(read(number)) for number in range(2)]
    await asyncio.gather(*(event.wait() for event in begun))
    assert port.pid is not None
    os.kill(port.pid, signal.SIGKILL)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, ReplicaLost)
        assert str(port.pid) in result.message
    assert (client.alive, port.alive, len(reasons)) == (False, False, 1)
    with pytest.raises(ReplicaLost):
        await anext(aiter(client.generate(request("late", 2))))
    await client.close()
    assert gone(port.pid)


def test_closing_in_the_middle_of_a_request_ends_the_child_by_itself(tiny_llama_dir: Path) -> None:
    started = Started(tiny_llama_dir)
    port, sink = started.port, started.sink
    port.send(add("a", 480))
    while not sink.next_frame().deltas:
        pass
    port.close()
    assert port._process is not None and port._process.returncode == 0, "it was not killed"
    assert gone(port.pid)
    assert not port.alive
    assert sink.exit_reason()
    with pytest.raises(ReplicaLost):
        port.send(add("b"))
    port.close()
    assert sink.exits.empty()
