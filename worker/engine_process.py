"""ProcessEnginePort: the engine in a child process, one msgpack frame per step over a socketpair.

torch takes the GIL hundreds of times a step; in a process of its own the step loop shares it with nobody, and a
crash of the model cannot take the replica's health checks with it.

Owns: the child process, the parent's end of the socket, and the two threads that read and write it.
Does not: run steps (engine_main, in the child).
Invariants: those of EnginePort; the child never outlives this process (it ends when its socket closes).
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import sys
import threading

from cluster.config import EngineConfig
from cluster.core.errors import ConfigError, ReplicaLost, from_wire
from cluster.core.replica import ReplicaLoad
from worker.engine_port import EngineSink
from worker.engine_wire import MessageSocket
from worker.frame import EngineCommand, EngineFrame
from worker.runner import ModelFacts

logger = logging.getLogger(__name__)

_EXIT_WAIT_S = 5.0


class ProcessEnginePort:
    """`model_dir` is a local directory; the child loads it with `config`."""

    def __init__(self, config: EngineConfig, model_dir: str) -> None:
        self._config = config
        self._model_dir = model_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: MessageSocket | None = None
        self._outbox: queue.SimpleQueue[EngineCommand | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ended = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and not self._ended and self._process.poll() is None

    def start(self, sink: EngineSink) -> ModelFacts:
        ours, theirs = socket.socketpair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "worker.engine_main", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._socket = MessageSocket(ours)
        self._socket.write({"config": self._config.model_dump(), "model_dir": self._model_dir})
        # The first message answers the start; frames may already follow it in the same read.
        messages = self._socket.read(wait=True)
        if messages is None:
            code = self._process.wait()
            self.close()
            raise ConfigError(f"the engine process ended while it started (exit code {code}); its log says why")
        if "error" in messages[0]:
            self.close()
            raise from_wire(messages[0]["error"])
        self._threads = [
            threading.Thread(target=self._read, args=(sink, messages[1:]), name="kvray-frames", daemon=True),
            threading.Thread(target=self._write, name="kvray-commands", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return ModelFacts.from_wire(messages[0]["facts"])

    def send(self, command: EngineCommand) -> None:
        if not self.alive:
            raise ReplicaLost("the engine process is gone")
        self._outbox.put(command)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._outbox.put(None)
        if self._process is not None:
            try:
                self._process.wait(_EXIT_WAIT_S)
            except subprocess.TimeoutExpired:
                logger.warning("engine process %d did not end in %.0f s and is killed", self._process.pid, _EXIT_WAIT_S)
                self._process.kill()
                self._process.wait()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _read(self, sink: EngineSink, early: list[object]) -> None:
        assert self._socket is not None and self._process is not None
        messages: list[object] | None = early
        reason, load = "", ReplicaLoad()
        try:
            while messages is not None:
                for message in messages:
                    if isinstance(message, dict):
                        reason = f": {message['failed']}"
                    else:
                        frame = EngineFrame.from_wire(message, load)  # type: ignore[arg-type]
                        load = frame.load
                        sink.on_frame(frame)
                messages = self._socket.read(wait=True)
        except Exception:
            logger.exception("engine process %d sent what is no frame and is killed", self._process.pid)
            self._process.kill()
        self._ended = True  # first: a command that is accepted after the sink was told would wait for ever
        sink.on_exit(f"engine process {self._process.pid} ended{reason}")

    def _write(self) -> None:
        """A full socket blocks this thread while the child is in a step, never the caller of `send`."""
        assert self._socket is not None
        while (command := self._outbox.get()) is not None:
            if not self._socket.write(command.to_wire()):
                return  # the reader sees the end too
