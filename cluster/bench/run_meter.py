"""RunMeter: what the machine did during one run: whose CPU time it was, and how much memory the server took.

Noise is CPU time of processes that belong to nobody here, as a share of all cores' time: it is what makes a run
worthless. This process and everything it started (servers, the engine, the background load) and the trees of the given
server processes are known.

Owns: the arithmetic of noise, and waiting for a quiet machine.
Does not: drop runs (session).
Invariants: noise is None, not 0, when a server of this machine has no known process; waiting has an end.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.bench.peer import Peer
from cluster.bench.process_table import ProcessTable, descendants

_QUIET_NOISE = 0.08
_WATCH_S = 0.7
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    noise: float | None = None
    server_cpu_s: float | None = None
    client_cpu_s: float | None = None
    peak_rss: int | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """Seconds of CPU time until `at_s`, of everybody and of the known processes."""

    at_s: float
    busy_s: float
    known_s: float
    cores: int


def noise_between(before: Moment, after: Moment) -> float:
    others = (after.busy_s - before.busy_s) - (after.known_s - before.known_s)
    span = (after.at_s - before.at_s) * before.cores
    return max(0.0, others / span) if span > 0 else 0.0


class Meter(Protocol):
    async def wait_for_quiet(self, longest_s: float) -> None: ...
    def start(self, peer: Peer) -> None: ...
    def stop(self) -> Usage: ...


class RunMeter:
    """One run at a time: `start`, then `stop`."""

    def __init__(self, peers: Sequence[Peer], table: ProcessTable | None = None) -> None:
        self._table = table or ProcessTable()
        self._roots = [os.getpid(), *(peer.facts.pid for peer in peers if peer.facts.pid is not None)]
        self.sees_all = self._table.available and not any(p.is_local and p.facts.pid is None for p in peers)
        self._server: int | None = None
        self._started: tuple[Moment, float, float] | None = None

    async def wait_for_quiet(self, longest_s: float) -> None:
        deadline = time.monotonic() + longest_s
        while self.sees_all and time.monotonic() < deadline:
            before = self._now()
            await asyncio.sleep(_WATCH_S)
            if noise_between(before, self._now()) < _QUIET_NOISE:
                return
            await asyncio.sleep(_PAUSE_S)

    def start(self, peer: Peer) -> None:
        self._server = peer.facts.pid if self._table.available else None
        if self._server is not None:
            self._table.reset_peaks(self._tree(self._server))
        if self._table.available:
            self._started = (self._now(), self._server_cpu_s(), time.process_time())

    def stop(self) -> Usage:
        if self._started is None:
            return Usage()
        before, server_s, client_s = self._started
        self._started = None
        now = self._now()
        watched = self._server is not None
        return Usage(
            noise=round(noise_between(before, now), 4) if self.sees_all else None,
            server_cpu_s=round(self._server_cpu_s() - server_s, 3) if watched else None,
            client_cpu_s=round(time.process_time() - client_s, 3),
            peak_rss=self.memory(self._server, "VmHWM"),
        )

    def memory(self, pid: int | None, field: str = "VmRSS") -> int | None:
        """Bytes of the tree below `pid`."""
        if pid is None or not self._table.available:
            return None
        return self._table.memory(self._tree(pid), field)

    def _now(self) -> Moment:
        processes = self._table.processes()
        known = sum(processes[pid].cpu_ticks for pid in descendants(processes, self._roots))
        clock, ticks = self._table.clock(), self._table.ticks_per_s
        return Moment(time.monotonic(), clock.busy_ticks / ticks, known / ticks, clock.cores)

    def _server_cpu_s(self) -> float:
        if self._server is None:
            return 0.0
        processes = self._table.processes()
        ticks = sum(processes[pid].cpu_ticks for pid in descendants(processes, [self._server]))
        return ticks / self._table.ticks_per_s

    def _tree(self, pid: int) -> set[int]:
        return descendants(self._table.processes(), [pid])
