"""The engine child process: `python -m worker.engine_main FD`.

Owns: this process's start-up, what is left for after it, its logging and its end.
Does not: outlive its parent: a closed socket ends the loop.
Invariants: the first message out is either {"facts"}, when the model is loaded and its kernels are warm, or {"error"};
after it, one frame per step, the first with the load, and {"failed"} as the last one when the engine ends by itself.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import time
from collections.abc import Callable

from cluster.config import EngineConfig
from cluster.core.errors import ConfigError, KvrayError
from cluster.core.replica import ReplicaLoad
from cluster.garbage_collection import calm_garbage_collector
from cluster.telemetry import configure_logging
from worker.engine_factory import build_engine
from worker.engine_loop import run_engine_loop
from worker.engine_wire import MessageSocket
from worker.frame import EngineFrame
from worker.socket_commands import SocketCommands

logger = logging.getLogger(__name__)

# A fifth of the heartbeats' interval. What requests do (their number, uncached tokens) is told at once.
LOAD_INTERVAL_S = 0.1


class FrameWriter:
    """Sends a frame per step, with the load only when it says something new.

    In a step of one token it would be most of the message, and both processes would pay for it with caches that the
    weights have just emptied.
    """

    def __init__(self, messages: MessageSocket, clock: Callable[[], float]) -> None:
        self._messages = messages
        self._clock = clock
        self._sent, self._sent_at = ReplicaLoad(), float("-inf")

    def emit(self, frame: EngineFrame) -> None:
        """A closed socket shows in the next drain."""
        load, sent, now = frame.load, self._sent, self._clock()
        news = (
            now - self._sent_at >= LOAD_INTERVAL_S
            or load.running != sent.running
            or load.waiting != sent.waiting
            or load.draining != sent.draining
            or load.uncached_tokens != sent.uncached_tokens
        )
        if news:
            self._sent, self._sent_at = load, now
        self._messages.write(frame.to_wire(with_load=news))


def main(fd: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us in order
    configure_logging("engine")
    messages = MessageSocket(socket.socket(fileno=fd))
    first = messages.read(wait=True)
    if first is None:
        return 0
    try:
        config = EngineConfig.model_validate(first[0]["config"])
        engine, facts = build_engine(config, first[0]["model_dir"], warm=True)
    except KvrayError as error:
        messages.write({"error": error.to_wire()})
        return 1
    except Exception as error:
        logger.exception("the engine cannot start")
        messages.write({"error": ConfigError(f"the engine cannot start: {type(error).__name__}: {error}").to_wire()})
        return 1
    messages.write({"facts": facts.to_wire()})

    calm_garbage_collector()
    engine.warm_up()  # only now: it would add a second to the start
    commands = SocketCommands(messages)
    try:
        run_engine_loop(engine, commands, FrameWriter(messages, time.monotonic).emit, time.monotonic)
    except Exception as error:
        logger.exception("the engine failed")
        messages.write({"failed": f"{type(error).__name__}: {error}"})
        return 1
    finally:
        engine.close()
        commands.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
