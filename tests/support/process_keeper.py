"""Kept: a command with all that ever comes of it, daemons and orphans included, that a test can end for certain.

A keeper process stands between: whatever loses its parent becomes the keeper's child (a subreaper, Linux only), so the
tree below it is complete. It ends that tree when its standard input closes, and so also when the test is killed.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from process_tree import descendants

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.2


class Kept:
    """`argv`, started at once, its output in `log`. `inside`: a command in front, such as nsenter with its options."""

    def __init__(
        self, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, inside: Sequence[str] = ()
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self._keeper = subprocess.Popen(
                [*inside, sys.executable, "-S", __file__, str(log), *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                env=None if env is None else dict(env),
            )
        assert self._keeper.stdout is not None
        with self._keeper.stdout as answer:
            started = answer.readline()
        if not started:
            self._keeper.wait(30)
            raise AssertionError(f"{argv[0]} did not start: {self.said()}")
        self.command_pid = int(started)

    @property
    def pid(self) -> int:
        """The keeper's; the command is below it."""
        return self._keeper.pid

    def processes(self) -> list[int]:
        return descendants(self.pid)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def interrupt(self, timeout_s: float) -> None:
        """SIGINT to the command itself, and wait until all is gone; then, or when the time is up, `kill`."""
        if self.command_pid in self.processes():
            os.kill(self.command_pid, signal.SIGINT)
        self.wait(timeout_s)
        self.kill()

    def wait(self, timeout_s: float) -> bool:
        """Whether everything has ended by itself."""
        deadline = time.monotonic() + timeout_s
        while self.processes():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def kill(self) -> None:
        """SIGKILL to every process of the tree, at once."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait(30)

    def __enter__(self) -> Kept:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def keep(log: Path, argv: Sequence[str]) -> None:
    """The keeper's own life."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with log.open("ab") as output:
        command = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    print(command.pid, flush=True)
    while not select.select([sys.stdin], [], [], _POLL_S)[0]:
        _bury()
    while below := descendants(os.getpid()):
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
        _bury()


def _bury() -> None:
    """Zombies are still in the process tree."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return


if __name__ == "__main__":
    keep(Path(sys.argv[1]), sys.argv[2:])
