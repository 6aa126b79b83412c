"""ThreadEnginePort: the engine on a thread of this process, for tests, `kvray generate` and the lab.

Owns: the thread and the command queue.
Does not: isolate the engine: Python code of the caller shares the GIL with the step loop.
Invariants: those of EnginePort.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from cluster.core.errors import ReplicaLost
from worker.engine import Engine
from worker.engine_loop import run_engine_loop
from worker.engine_port import EngineSink
from worker.frame import EngineCommand
from worker.runner import ModelFacts

logger = logging.getLogger(__name__)


class ThreadEnginePort:
    """`build` makes the engine and its facts; it runs on the caller's thread inside `start`."""

    def __init__(self, build: Callable[[], tuple[Engine, ModelFacts]]) -> None:
        self._build = build
        self._commands: queue.SimpleQueue[EngineCommand | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False

    def start(self, sink: EngineSink) -> ModelFacts:
        engine, facts = self._build()
        self._thread = threading.Thread(target=self._run, args=(engine, sink), name="kvray-engine", daemon=True)
        self._thread.start()
        return facts

    @property
    def alive(self) -> bool:
        return self._thread is not None and not self._ended

    def send(self, command: EngineCommand) -> None:
        if not self.alive:
            raise ReplicaLost("the engine is not running")
        self._commands.put(command)

    def close(self) -> None:
        self._commands.put(None)
        if self._thread is not None:
            self._thread.join()

    def drain(self, *, wait: bool, timeout_s: float | None = None) -> Sequence[EngineCommand] | None:
        """CommandSource for the loop, as is `wake`; None once `close` was called."""
        commands: list[EngineCommand] = []
        try:
            item = self._commands.get(block=wait, timeout=timeout_s)
            while item is not None:
                commands.append(item)
                item = self._commands.get_nowait()
        except queue.Empty:
            return commands
        return None

    def wake(self) -> None:
        self._commands.put(EngineCommand())

    def _run(self, engine: Engine, sink: EngineSink) -> None:
        reason = "closed"
        try:
            run_engine_loop(engine, self, sink.on_frame, time.monotonic)
        except Exception as error:
            logger.exception("the engine failed")
            reason = f"{type(error).__name__}: {error}"
        engine.close()
        self._ended = True  # first: a command that is accepted after the sink was told would wait for ever
        sink.on_exit(reason)
