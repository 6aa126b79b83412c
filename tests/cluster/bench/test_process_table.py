"""/proc as text: CPU time, trees and memory of processes, and the noise that follows from them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from cluster.bench.peer import Peer, PeerFacts, TimedAnswer
from cluster.bench.process_table import CpuClock, Process, ProcessTable, descendants, parse_clock, parse_process
from cluster.bench.run_meter import Moment, RunMeter, noise_between

STAT = "cpu  100 10 30 800 50 5 5 20 70 0\ncpu0 50 5 15 400 25 2 3 10 35 0\ncpu1 50 5 15 400 25 3 2 10 35 0\nintr 5\n"


def process_line(pid: int, parent: int, ticks: tuple[int, int, int, int], name: str = "python") -> str:
    before = f"S {parent} 1 1 0 -1 4194304 101 0 0 0"
    return f"{pid} ({name}) {before} {' '.join(map(str, ticks))} 20 0 1 0 99 3133440 384"


class FakeProc:
    """A folder that looks like /proc of a machine with two cores and 100 ticks a second."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.set_busy(0)

    def set_busy(self, ticks: int) -> None:
        (self.root / "stat").write_text(f"cpu  {ticks} 0 0 1000 0 0 0 0 0 0\ncpu0 0\ncpu1 0\n")

    def set_process(self, pid: int, parent: int, ticks: int, resident_kib: int = 0) -> None:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "stat").write_text(process_line(pid, parent, (ticks, 0, 0, 0)))
        (folder / "status").write_text(f"Name:\tx\nVmHWM:\t{2 * resident_kib} kB\nVmRSS:\t{resident_kib} kB\n")


class SilentPeer:
    can_defeat_cache = False

    def __init__(self, pid: int | None, *, is_local: bool = True) -> None:
        self.facts = PeerFacts(name="peer", kind="", address="", model="", pid=pid)
        self.is_local = is_local

    async def complete(self, prompt: str, max_tokens: int, *, caching: bool) -> TimedAnswer:
        raise AssertionError("nobody asks")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


def test_waiting_for_the_disk_is_idle_and_time_the_host_took_is_busy() -> None:
    assert parse_clock(STAT) == CpuClock(busy_ticks=170, cores=2)


def test_a_name_with_parentheses_and_time_of_ended_children() -> None:
    line = process_line(42, 7, (10, 20, 3, 4), name="a) (b c) R 1")
    assert parse_process(line) == Process(pid=42, parent=7, cpu_ticks=37)


def test_descendants() -> None:
    table = {pid: Process(pid, parent, 0) for pid, parent in [(1, 0), (2, 1), (3, 2), (4, 1), (5, 4), (6, 6)]}
    assert descendants(table, [2, 4]) == {2, 3, 4, 5}
    assert descendants(table, [2, 3, 99]) == {2, 3}
    assert descendants(table, [6]) == {6}


def test_noise_is_what_nobody_here_used() -> None:
    before = Moment(at_s=0, busy_s=5, known_s=1, cores=2)
    assert noise_between(before, Moment(at_s=10, busy_s=25, known_s=17, cores=2)) == pytest.approx(0.2)
    assert noise_between(before, Moment(at_s=10, busy_s=20, known_s=17, cores=2)) == 0.0
    assert noise_between(before, before) == 0.0


def test_a_meter_tells_servers_from_others(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.getpid()
    for pid, parent in ((me, 1), (800, 1), (801, 800), (900, 1)):
        proc.set_process(pid, parent, 0, resident_kib=1024)
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    table = ProcessTable(proc.root)
    peer: Peer = SilentPeer(800)
    meter = RunMeter([peer], table)
    meter.start(peer)
    ticks = table.ticks_per_s
    clock[0] += 10.0
    proc.set_process(me, 1, 1 * ticks)
    proc.set_process(800, 1, 2 * ticks, resident_kib=1024)
    proc.set_process(801, 800, 5 * ticks, resident_kib=2048)
    proc.set_process(900, 1, 4 * ticks)  # a stranger
    proc.set_busy(12 * ticks)
    usage = meter.stop()
    assert usage.noise == pytest.approx(0.2)
    assert usage.server_cpu_s == pytest.approx(7.0)
    assert usage.peak_rss == 2 * 3072 * 1024
    assert meter.memory(800) == 3072 * 1024
    assert (proc.root / "801" / "clear_refs").read_text() == "5"


@pytest.mark.parametrize(("pid", "is_local", "known"), [(None, True, False), (None, False, True), (5, True, True)])
def test_noise_is_unknown_when_a_server_here_has_no_process(
    proc: FakeProc, pid: int | None, is_local: bool, known: bool
) -> None:
    peer = SilentPeer(pid, is_local=is_local)
    meter = RunMeter([peer], ProcessTable(proc.root))
    meter.start(peer)
    assert (meter.stop().noise is not None) is known


async def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    peer = SilentPeer(5)
    meter = RunMeter([peer], ProcessTable(tmp_path / "none"))
    await meter.wait_for_quiet(60)
    meter.start(peer)
    assert (meter.stop().noise, meter.memory(5)) == (None, None)


async def test_waiting_for_quiet_ends_when_it_is_quiet_and_when_the_time_is_over(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.bench.run_meter._WATCH_S", 0.02)
    monkeypatch.setattr("cluster.bench.run_meter._PAUSE_S", 0.0)
    meter = RunMeter([], ProcessTable(proc.root))
    async with asyncio.timeout(10):
        await meter.wait_for_quiet(60)

    async def others() -> None:
        for ticks in range(0, 10_000_000, 1000):
            proc.set_busy(ticks)
            await asyncio.sleep(0.002)

    busy = asyncio.create_task(others())
    started = asyncio.get_running_loop().time()
    await meter.wait_for_quiet(0.2)
    assert asyncio.get_running_loop().time() - started >= 0.2
    busy.cancel()
