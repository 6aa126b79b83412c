"""BackgroundLoad: processes that keep a share of all cores busy while a run goes on.

Each core gets one process that takes that share of a core. What they really took is read from their own CPU time: a
busy machine may give them less.

Owns: these processes.
Does not: count as noise (run_meter knows all processes below this one).
Invariants: a process ends when told, when this process is gone, or after its longest life, whichever is first.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import suppress

_LONGEST_S = 1800
_STOP_S = 10.0


class BackgroundLoad:
    """`share`: of all cores' time, above 0 and at most 1."""

    def __init__(self, share: float, cores: int | None = None) -> None:
        self.share = share
        self._cores = cores or os.cpu_count() or 1
        self._processes: list[asyncio.subprocess.Process] = []
        self._started = 0.0

    async def start(self) -> None:
        """Returns when all of them spin."""
        command = (sys.executable, "-m", "cluster.bench.busy_child", str(self.share), str(_LONGEST_S))
        pipe = asyncio.subprocess.PIPE
        for _ in range(self._cores):
            process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
            self._processes.append(process)
        for process in self._processes:
            assert process.stdout is not None
            await process.stdout.readline()
        self._started = time.monotonic()

    async def stop(self) -> float:
        """The share that they took since `start` returned."""
        elapsed = max(time.monotonic() - self._started, 1e-9)
        taken = [await self._end(process) for process in self._processes]
        self._processes.clear()
        return round(sum(taken) / (elapsed * self._cores), 3)

    async def _end(self, process: asyncio.subprocess.Process) -> float:
        """Its CPU seconds while it spun."""
        try:
            async with asyncio.timeout(_STOP_S):
                said, _ = await process.communicate(b"")  # a closed input tells it to end
            return float(said)
        except (TimeoutError, ValueError):
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            return 0.0
