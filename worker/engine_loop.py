"""The engine's loop: take commands, run a step, hand out a frame, until the command source closes.

Owns: the order of these three, when the loop sleeps, the check of the KV bookkeeping before it does, and the status
line every 10 s while busy.
Does not: know whether commands come over a socket or a queue (CommandSource), who reads the frames, or what is checked.
Invariants: with work the loop never waits; without work, or when all of it waits for grammars, it waits for commands
and grammars, once the bookkeeping is found sound, and these wait at most for one piece of that check; one frame per
round.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.core.replica import ReplicaLoad
from worker.engine import Engine
from worker.frame import EngineCommand, EngineFrame

logger = logging.getLogger(__name__)

STATUS_INTERVAL_S = 10.0


class CommandSource(Protocol):
    def drain(self, *, wait: bool) -> Sequence[EngineCommand] | None:
        """All commands that are there; `wait`: once there is one, or `wake` is called. None: the other side is gone."""

    def wake(self) -> None:
        """From any thread: a `drain` that waits, now or next, returns."""


def calm_garbage_collector() -> None:
    """For a process whose one job is the loop: a step makes hundreds of short-lived objects and no cycles.

    What is loaded is never looked at again, and the rest is looked at rarely; by default the collector walks every live
    sequence several times a second, which costs as much as the bookkeeping itself (benchmarks/RESULTS.md).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


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
        commands = _next_commands(engine, source) if idle else source.drain(wait=False)
        if commands is None:
            return
        if idle:
            status.wake()
        engine.execute(commands)
        frame = engine.step()
        emit(frame)
        status.update(frame.load)


def _next_commands(engine: Engine, source: CommandSource) -> Sequence[EngineCommand] | None:
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
    return source.drain(wait=True)


class StatusLine:
    """Logs one INFO line at most every `STATUS_INTERVAL_S` while there is traffic.

    A line tells of the time since `_since`, when the counters stood at `_last`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = self._seen_at = clock()
        self._last = self._seen = ReplicaLoad()

    def wake(self) -> None:
        """The engine was idle until now. A long pause is no part of the next line, or its rate would be near 0."""
        now = self._clock()
        if now - self._seen_at >= STATUS_INTERVAL_S:
            self._since, self._last = now, self._seen

    def update(self, load: ReplicaLoad) -> None:
        now = self._clock()
        self._seen, self._seen_at = load, now
        if now - self._since < STATUS_INTERVAL_S:
            return
        if load.generated_tokens != self._last.generated_tokens or load.query_tokens != self._last.query_tokens:
            logger.info("%s", self.format(load, now - self._since))
        self._since, self._last = now, load

    def format(self, load: ReplicaLoad, elapsed: float) -> str:
        used = 100.0 * load.in_use_blocks / max(load.total_blocks, 1)
        hits = 100.0 * load.hit_tokens / max(load.query_tokens, 1)
        rate = (load.generated_tokens - self._last.generated_tokens) / max(elapsed, 1e-9)
        return (
            f"{rate:.1f} tokens/s, running {load.running}, waiting {load.waiting}, KV use {used:.1f} %, "
            f"prefix hit rate {hits:.1f} %, preemptions {load.preemptions}"
        )
