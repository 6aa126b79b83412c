"""ThreadEnginePort with the model-free engine: the promises of EnginePort, kept on a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import fake_engine as fakes
import pytest
from recording_sink import RecordingSink, tokens_of

from cluster.core.errors import ConfigError, ReplicaLost, RequestTooLong
from cluster.core.request import FinishReason
from worker.engine import Engine
from worker.engine_thread import ThreadEnginePort
from worker.frame import EngineCommand
from worker.runner import ModelFacts

PROMPT = list(range(1, 10))


class Started:
    """A port that runs over a fake engine."""

    def __init__(self, **options: object) -> None:
        self.fake = fakes.make_fake_engine(**options)  # type: ignore[arg-type]
        self.port = ThreadEnginePort(lambda: (self.fake.engine, self.fake.runner.facts))
        self.sink = RecordingSink()
        self.facts = self.port.start(self.sink)

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 8) -> None:
        self.port.send(self.fake.command(request_id, prompt, max_tokens))


@pytest.fixture
def start() -> Iterator[Callable[..., Started]]:
    running: list[Started] = []

    def make(**options: object) -> Started:
        running.append(Started(**options))
        return running[-1]

    yield make
    for started in running:
        started.port.close()


def test_start_gives_the_facts_and_a_first_frame(start: Callable[..., Started]) -> None:
    started = start()
    assert started.facts == started.fake.runner.facts
    assert started.port.alive
    frame = started.sink.next_frame()
    assert (frame.deltas, frame.load.free_blocks) == ((), 32)


def test_requests_stream_token_by_token(start: Callable[..., Started]) -> None:
    started = start()
    started.add("a", PROMPT, 5)
    started.add("b", [40, 41], 9)
    deltas = started.sink.until_last("a", "b")
    assert tokens_of(deltas["a"]) == fakes.expected_answer(PROMPT, 5)
    assert tokens_of(deltas["b"]) == fakes.expected_answer([40, 41], 9)
    assert [len(d.token_ids) for d in deltas["b"]] == [1] * 9
    assert [d.finish_reason for d in deltas["a"]] == [None] * 4 + [FinishReason.LENGTH]


def test_the_cache_outlives_a_request(start: Callable[..., Started]) -> None:
    started = start()
    started.add("a", PROMPT)
    assert started.sink.until_last("a")["a"][0].cached_tokens == 0
    started.add("b", PROMPT)
    assert started.sink.until_last("b")["b"][0].cached_tokens == 8


def test_cancel_ends_a_running_request(start: Callable[..., Started]) -> None:
    started = start(num_blocks=64)
    started.add("a", PROMPT, 200)
    while not started.sink.next_frame().deltas:
        pass
    started.port.send(EngineCommand(cancel="a"))
    last = started.sink.until_last("a")["a"][-1]
    assert last.finish_reason is FinishReason.CANCELLED
    started.add("b", PROMPT, 3)
    assert tokens_of(started.sink.until_last("b")["b"]) == fakes.expected_answer(PROMPT, 3)


def test_what_can_never_fit_is_refused_with_its_limit_and_the_engine_goes_on(start: Callable[..., Started]) -> None:
    started = start(num_blocks=8)
    started.add("long", list(range(1, 40)))
    (delta,) = started.sink.until_last("long")["long"]
    assert isinstance(delta.error, RequestTooLong)
    assert (delta.error.field, delta.error.limit) == ("prompt", 32)
    started.add("a", PROMPT, 2)
    assert tokens_of(started.sink.until_last("a")["a"]) == fakes.expected_answer(PROMPT, 2)


def test_close_ends_the_thread_tells_the_sink_once_and_refuses_commands(start: Callable[..., Started]) -> None:
    started = start()
    started.add("a", PROMPT, 100)
    started.port.close()
    assert not started.port.alive
    assert started.sink.exit_reason() == "closed"
    started.port.close()
    assert started.sink.exits.empty()
    with pytest.raises(ReplicaLost):
        started.port.send(EngineCommand(cancel="a"))


def test_a_model_that_fails_ends_the_engine_with_its_reason(
    start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = start()

    def broken(batch: object) -> list[int]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(started.fake.runner, "run", broken)
    started.add("a", PROMPT)
    assert started.sink.exit_reason() == "RuntimeError: out of memory"


def test_wrong_books_end_an_idle_engine_with_their_reason() -> None:
    fake = fakes.make_fake_engine()
    fake.engine._check = False  # as in production: not after every step
    fake.engine._manager._pool._refs[5] = 3  # a leak
    port = ThreadEnginePort(lambda: (fake.engine, fake.runner.facts))
    sink = RecordingSink()
    port.start(sink)
    reason = sink.exit_reason()
    assert reason.startswith("AssertionError: ref counts differ")
    assert "(5, 3, 0)" in reason
    assert not port.alive


def test_the_port_refuses_commands_before_it_tells_of_its_end() -> None:
    """Otherwise a request that arrives while the sink is being told is taken, and never answered."""
    fake = fakes.make_fake_engine()
    port = ThreadEnginePort(lambda: (fake.engine, fake.runner.facts))
    refused: list[bool] = []

    def send() -> None:
        try:
            port.send(fake.command("late", PROMPT))
        except ReplicaLost:
            refused.append(not port.alive)

    sink = RecordingSink(on_end=send)
    port.start(sink)
    port.close()
    assert sink.exit_reason() == "closed"
    assert refused == [True]


def test_before_start_nothing_is_accepted() -> None:
    fake = fakes.make_fake_engine()
    port = ThreadEnginePort(lambda: (fake.engine, fake.runner.facts))
    assert not port.alive
    with pytest.raises(ReplicaLost):
        port.send(EngineCommand(cancel="a"))
    port.close()


def test_an_engine_that_cannot_be_built_raises_in_start() -> None:
    def build() -> tuple[Engine, ModelFacts]:
        raise ConfigError("no such model")

    sink = RecordingSink()
    port = ThreadEnginePort(build)
    with pytest.raises(ConfigError, match="no such model"):
        port.start(sink)
    assert not port.alive
    assert sink.exits.empty()
