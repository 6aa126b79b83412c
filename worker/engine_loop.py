"""The engine's loop: take commands, run a step, hand out a frame, until the command source closes.

Owns: the order of these three, when the loop sleeps, the check of the KV bookkeeping before it does, and the status
line every 10 s while busy.
Does not: know whether commands come over a socket or a queue (CommandSource), who reads the frames, or what is checked.
Invariants: with work the loop never waits. Without work, or when all of it is paused or waits for grammars, it waits
for commands, grammars and deadlines, once the bookkeeping is found sound, and these wait at most for one piece of that
check. One frame per round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from worker.engine import Engine
from worker.frame import EngineCommand, EngineFrame
from worker.step_stats import EngineTotals, StepStats

logger = logging.getLogger(__name__)

STATUS_INTERVAL_S = 10.0


class CommandSource(Protocol):
    def drain(self, *, wait: bool, timeout_s: float | None = None) -> Sequence[EngineCommand] | None:
        """All commands that are there. None: the other side is gone.

        `wait`: once there is one, `wake` is called, or `timeout_s` is over.
        """

    def wake(self) -> None:
        """From any thread: a `drain` that waits, now or next, returns."""


def run_engine_loop(
    engine: Engine,
    source: CommandSource,
    emit: Callable[[EngineFrame], None],
    clock: Callable[[], float],
) -> None:
    """Returns when the source closes.

    Exceptions are not caught, be they the model's or an AssertionError about the KV bookkeeping: the engine ends with
    that reason, and whoever started it replaces it.
    """
    engine.wake_with(source.wake)
    emit(engine.step())
    status = StatusLine(clock)
    while True:
        idle = engine.idle
        commands = _next_commands(engine, source, clock) if idle else source.drain(wait=False)
        if commands is None:
            return
        if idle:
            status.wake()
        engine.execute(commands)
        frame = engine.step()
        emit(frame)
        status.update(engine.last_step)


def _next_commands(engine: Engine, source: CommandSource, clock: Callable[[], float]) -> Sequence[EngineCommand] | None:
    """Wait for commands, but first check, once per pause, that every block is where the books say.

    Nothing changes while the engine is idle, so one whole check says all there is to say, and then the loop sleeps.
    A command or grammar that arrives before its end drops it: the next pause begins anew.
    """
    try:
        for _ in engine.audit():
            commands = source.drain(wait=False)
            if commands is None or commands or not engine.idle:
                return commands
    except AssertionError as error:
        logger.error("the KV bookkeeping is wrong, the engine stops: %s", error)
        raise
    deadline = engine.next_deadline  # of a request that waits while the engine is paused, or for its grammar
    return source.drain(wait=True, timeout_s=None if deadline is None else max(deadline - clock(), 0.0))


class StatusLine:
    """Logs one INFO line at most every `STATUS_INTERVAL_S` while there is traffic.

    A line tells of the time since `_since`, when the totals stood at `_last`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = self._seen_at = clock()
        self._last = self._seen = EngineTotals()

    def wake(self) -> None:
        """The engine was idle until now. A long pause is no part of the next line, or its rate would be near 0."""
        now = self._clock()
        if now - self._seen_at >= STATUS_INTERVAL_S:
            self._since, self._last = now, self._seen

    def update(self, stats: StepStats) -> None:
        now = self._clock()
        totals, last = stats.totals, self._last
        self._seen, self._seen_at = totals, now
        if now - self._since < STATUS_INTERVAL_S:
            return
        if totals.generated_tokens != last.generated_tokens or totals.query_tokens != last.query_tokens:
            logger.info("%s", self.format(stats, now - self._since))
        self._since, self._last = now, totals

    def format(self, stats: StepStats, elapsed: float) -> str:
        blocks, totals = stats.blocks, stats.totals
        used = 100.0 * blocks.in_use / max(blocks.total, 1)
        hits = 100.0 * totals.hit_tokens / max(totals.query_tokens, 1)
        rate = (totals.generated_tokens - self._last.generated_tokens) / max(elapsed, 1e-9)
        return (
            f"{rate:.1f} tokens/s, running {stats.running}, waiting {stats.waiting}, KV use {used:.1f} %, "
            f"prefix hit rate {hits:.1f} %, preemptions {totals.preemptions}"
        )
