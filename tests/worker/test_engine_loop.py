"""The engine's loop and its status line, with scripted commands and a clock that the test moves."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Sequence

import fake_engine as fakes
import pytest

from cluster.core.request import FinishReason
from worker.engine_loop import STATUS_INTERVAL_S, StatusLine, run_engine_loop
from worker.frame import EngineCommand, EngineFrame
from worker.kvcache.block_pool import BlockCounts
from worker.step_stats import EngineTotals, StepStats

PROMPT = list(range(1, 10))
LOGGER = "worker.engine_loop"

BLOCKS = BlockCounts(free=10, cached=5, in_use=5, total=20)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Script:
    """CommandSource: one batch of commands per call, then the end. `waits` records how it was asked."""

    def __init__(self, batches: Sequence[Sequence[EngineCommand]], on_drain: Callable[[], None] = lambda: None) -> None:
        self.batches = list(batches)
        self.waits: list[bool] = []
        self.timeouts: list[float | None] = []
        self.on_drain = on_drain

    def drain(self, *, wait: bool, timeout_s: float | None = None) -> Sequence[EngineCommand] | None:
        self.waits.append(wait)
        self.timeouts.append(timeout_s)
        self.on_drain()
        return self.batches.pop(0) if self.batches else None

    def wake(self) -> None:
        raise AssertionError("there is no grammar to wait for")


def run(fake: fakes.FakeEngine, script: Script, clock: Clock | None = None) -> list[EngineFrame]:
    frames: list[EngineFrame] = []
    run_engine_loop(fake.engine, script, frames.append, clock or Clock())
    return frames


def tokens_of(frames: Sequence[EngineFrame], request_id: str) -> list[int]:
    return [token for f in frames for d in f.deltas if d.request_id == request_id for token in d.token_ids]


def test_a_frame_per_round_and_one_before_the_first_command() -> None:
    fake = fakes.make_fake_engine()
    script = Script([[fake.command("a", PROMPT, max_tokens=3)], [], []])
    frames = run(fake, script)
    assert [len(f.deltas) for f in frames] == [0, 1, 1, 1]
    assert frames[0].load.total_blocks == 32
    assert tokens_of(frames, "a") == fakes.expected_answer(PROMPT, 3)
    assert fake.runner.steps == 3


def test_waits_for_commands_only_without_work() -> None:
    fake = fakes.make_fake_engine()
    script = Script([[fake.command("a", PROMPT, max_tokens=2)], [], [fake.command("b", [7], max_tokens=1)]])
    run(fake, script)
    assert script.waits == [True, False, True, True]


def test_cancel_ends_a_request_and_the_loop_goes_on() -> None:
    fake = fakes.make_fake_engine()
    script = Script(
        [
            [fake.command("a", PROMPT, max_tokens=20), fake.command("b", [3, 4], max_tokens=4)],
            [EngineCommand(cancel="a")],
            [],
            [],
        ]
    )
    frames = run(fake, script)
    ends = {d.request_id: d.finish_reason for f in frames for d in f.deltas if d.last}
    assert ends == {"a": FinishReason.CANCELLED, "b": FinishReason.LENGTH}
    assert tokens_of(frames, "b") == fakes.expected_answer([3, 4], 4)
    assert frames[-1].load.in_use_blocks == 0


def test_added_and_cancelled_in_one_batch_never_runs() -> None:
    fake = fakes.make_fake_engine()
    frames = run(fake, Script([[fake.command("a", PROMPT), EngineCommand(cancel="a")]]))
    assert [(d.request_id, d.finish_reason) for f in frames for d in f.deltas] == [("a", FinishReason.CANCELLED)]
    assert fake.runner.steps == 0


def test_closed_source_ends_the_loop_in_the_middle_of_work() -> None:
    fake = fakes.make_fake_engine()
    frames = run(fake, Script([[fake.command("a", PROMPT, max_tokens=20)]]))
    assert len(frames) == 2
    assert fake.engine.has_work


def test_errors_of_the_model_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fakes.make_fake_engine()

    def broken(batch: object) -> list[int]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(fake.runner, "run", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(fake, Script([[fake.command("a", PROMPT)]]))


class Audited:
    """Makes the engine's audit take `pieces` pieces, and records every one it comes to."""

    def __init__(self, fake: fakes.FakeEngine, monkeypatch: pytest.MonkeyPatch, pieces: int, wrong: str = "") -> None:
        self.done: list[int] = []
        self.finished = 0
        self._pieces, self._wrong = pieces, wrong
        monkeypatch.setattr(fake.engine, "audit", self._audit)

    def _audit(self) -> Iterator[None]:
        for piece in range(self._pieces):
            self.done.append(piece)
            yield
        assert not self._wrong, self._wrong
        self.finished += 1


def test_an_idle_engine_checks_its_books_once_and_then_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fakes.make_fake_engine()
    audit = Audited(fake, monkeypatch, pieces=3)
    script = Script([[], [], [], [fake.command("a", PROMPT, max_tokens=2)], []])
    run(fake, script)
    assert script.waits == [False, False, False, True, False, False], "polled between pieces, slept after the last"
    assert audit.done == [0, 1, 2, 0]
    assert audit.finished == 1


def test_a_command_that_comes_during_the_check_is_served_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next pause begins the check anew: what it had seen is not true any more."""
    fake = fakes.make_fake_engine()
    audit = Audited(fake, monkeypatch, pieces=3)
    script = Script([[], [fake.command("a", PROMPT, max_tokens=1)], [], [], []])
    frames = run(fake, script)
    assert tokens_of(frames, "a") == fakes.expected_answer(PROMPT, 1)
    assert len(frames) == 2, "polling makes no frames"
    assert audit.done == [0, 1, 0, 1, 2]
    assert audit.finished == 1


def test_the_books_are_not_checked_while_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fakes.make_fake_engine()
    audit = Audited(fake, monkeypatch, pieces=0)
    run(fake, Script([[fake.command("a", PROMPT, max_tokens=9)], *([[]] * 8)]))
    assert audit.finished == 2, "before the request and after it"


def test_a_source_that_closes_during_the_check_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fakes.make_fake_engine()
    audit = Audited(fake, monkeypatch, pieces=3)
    run(fake, Script([[]]))
    assert (audit.done, audit.finished) == ([0, 1], 0)


def test_wrong_books_stop_the_engine_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = fakes.make_fake_engine()
    fake.add(PROMPT, max_tokens=2)
    fake.finish()
    fake.engine._check = False  # as in production: not after every step
    fake.engine._manager._pool._refs[5] = 3  # a leak
    with pytest.raises(AssertionError, match=r"\(5, 3, 0\)"):
        run(fake, Script([[]]))
    (record,) = [r for r in caplog.records if r.name == LOGGER]
    assert record.levelno == logging.ERROR
    assert "(5, 3, 0)" in record.getMessage()


def status_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert all(r.levelno == logging.INFO for r in caplog.records if r.name == LOGGER)
    return [r.getMessage() for r in caplog.records if r.name == LOGGER]


def test_status_line_says_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    clock = Clock()
    status = StatusLine(clock)
    totals = EngineTotals(query_tokens=200, hit_tokens=50, generated_tokens=120, preemptions=7)
    stats = StepStats(running=3, waiting=2, blocks=BLOCKS, totals=totals)
    clock.now += STATUS_INTERVAL_S - 0.001
    status.update(stats)
    assert status_lines(caplog) == []
    clock.now += 0.001
    status.update(stats)
    assert status_lines(caplog) == [
        "12.0 tokens/s, running 3, waiting 2, KV use 25.0 %, prefix hit rate 25.0 %, preemptions 7"
    ]
    clock.now += 2 * STATUS_INTERVAL_S
    status.update(dataclasses.replace(stats, totals=dataclasses.replace(totals, generated_tokens=220)))
    assert status_lines(caplog)[1].startswith("5.0 tokens/s,"), "the rate is that of the last interval"


def test_prefill_alone_is_traffic_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    clock = Clock()
    status = StatusLine(clock)
    clock.now += STATUS_INTERVAL_S
    status.update(StepStats(blocks=BLOCKS, totals=EngineTotals(query_tokens=1000)))
    assert len(status_lines(caplog)) == 1


def test_busy_loop_logs_once_per_interval_and_an_idle_one_never(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    clock = Clock()
    fake = fakes.make_fake_engine()

    def tick() -> None:
        clock.now += 1.0

    busy = [[fake.command("a", PROMPT, max_tokens=35)], *([[]] * 34)]
    idle: list[list[EngineCommand]] = [[EngineCommand(cancel="nobody")]] * 60
    run(fake, Script([*busy, *idle], tick), clock)
    lines = status_lines(caplog)
    rates = [re.match(r"([\d.]+) tokens/s", line) for line in lines]
    assert [m and m[1] for m in rates] == ["1.0", "1.0", "1.0", "0.5"]


def test_a_long_idle_time_is_no_part_of_the_next_rate(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    clock = Clock()
    fake = fakes.make_fake_engine()
    short = [[fake.command("a", PROMPT, max_tokens=7)], *([[]] * 6)]
    script = Script([*short, [fake.command("b", PROMPT, max_tokens=21)], *([[]] * 20)])

    def tick() -> None:
        clock.now += 1000.0 if script.waits[-1] else 0.5

    script.on_drain = tick
    run(fake, script, clock)
    lines = status_lines(caplog)
    assert len(lines) == 1
    assert lines[0].startswith("2.1 tokens/s, running 0"), "the 21 tokens of the 10 s since the engine woke"
