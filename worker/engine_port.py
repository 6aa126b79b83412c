"""EnginePort: how the rest of a replica talks to its engine, wherever that runs.

Owns: the protocol and the sink's callbacks.
Does not: run the engine; `engine_process` (a child process) and `engine_thread` (same process) do.
Invariants: frames arrive in order; `on_exit` is called exactly once, after the last frame, also after `close`.
"""

from __future__ import annotations

from typing import Protocol

from worker.frame import EngineCommand, EngineFrame
from worker.runner import ModelFacts


class EngineSink(Protocol):
    """Called from the port's own thread; must not block."""

    def on_frame(self, frame: EngineFrame) -> None: ...

    def on_exit(self, reason: str) -> None:
        """The engine is gone; `reason` is for people."""


class EnginePort(Protocol):
    def start(self, sink: EngineSink) -> ModelFacts:
        """Start the engine and block until the model is loaded. ConfigError when it cannot start."""

    @property
    def alive(self) -> bool: ...

    def send(self, command: EngineCommand) -> None:
        """Queue a command; never blocks on the engine's step. ReplicaLost when the engine is gone."""

    def close(self) -> None:
        """End the engine and release everything. May be called twice."""
