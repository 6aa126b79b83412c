"""ProcessTable: CPU time and memory of processes, read from /proc.

Owns: the files' formats, and finding the descendants of a process.
Does not: say what is noise (run_meter).
Invariants: a process that ends while it is read counts as absent, never as an error; a process's CPU time includes its
children that it has waited for, so the sum over a tree never falls while the tree's root lives.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    cpu_ticks: int


@dataclass(frozen=True, slots=True)
class CpuClock:
    """Of all cores together: ticks spent on anything but waiting (time that the host took away included)."""

    busy_ticks: int
    cores: int


def parse_process(text: str) -> Process:
    """/proc/PID/stat. The name in parentheses may hold anything, also parentheses."""
    pid, _, rest = text.partition(" (")
    fields = rest.rpartition(")")[2].split()
    return Process(int(pid), int(fields[1]), sum(int(ticks) for ticks in fields[11:15]))


def parse_clock(text: str) -> CpuClock:
    """/proc/stat: user nice system idle iowait irq softirq steal; guest time is in user time already."""
    lines = [line.split() for line in text.splitlines() if line.startswith("cpu")]
    ticks = [int(value) for value in lines[0][1:9]]
    return CpuClock(sum(ticks) - ticks[3] - ticks[4], len(lines) - 1)


def parse_memory(text: str, field: str) -> int:
    """Bytes of `VmRSS` or `VmHWM` in /proc/PID/status; 0 for a kernel thread, which has none."""
    for line in text.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def descendants(processes: Mapping[int, Process], roots: Iterable[int]) -> set[int]:
    """The roots that exist and everything below them."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for process in processes.values():
        children[process.parent].append(process.pid)
    found: set[int] = set()
    todo = [pid for pid in roots if pid in processes]
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children[pid]
    return found


class ProcessTable:
    """`available` is False where there is no /proc; the other methods are not to be called then."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root
        self.available = (root / "stat").exists()
        self.ticks_per_s = os.sysconf("SC_CLK_TCK")

    def clock(self) -> CpuClock:
        return parse_clock((self._root / "stat").read_text())

    def processes(self) -> dict[int, Process]:
        found = {}
        for entry in os.listdir(self._root):
            if entry.isdigit():
                with suppress(OSError, ValueError, IndexError):
                    found[int(entry)] = parse_process((self._root / entry / "stat").read_text())
        return found

    def memory(self, pids: Iterable[int], field: str) -> int:
        """Sum over the processes; pages that they share count once for each."""
        total = 0
        for pid in pids:
            with suppress(OSError):
                total += parse_memory((self._root / str(pid) / "status").read_text(), field)
        return total

    def reset_peaks(self, pids: Iterable[int]) -> None:
        """Let VmHWM start again from what is resident now."""
        for pid in pids:
            with suppress(OSError):
                (self._root / str(pid) / "clear_refs").write_text("5")
