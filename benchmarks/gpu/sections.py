"""The sections of the GPU check, each in a process of its own.

A kernel that hangs or that breaks the device's context must not take the other sections with it. So a section runs in a
child, which prints a line of JSON per row; the parent stops it after its time.

Owns: the sections, their order and time limits, and the child's life.
Does not: measure, or use the device in the parent.
Invariants: rows that were finished are kept, whatever ends the child; a child that ends badly is a failed row.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.conformance import conformance
from benchmarks.gpu.decode_bandwidth import bandwidth
from benchmarks.gpu.environment import GpuEnvironment
from benchmarks.gpu.parity import parity
from benchmarks.gpu.report import Row, first_line
from benchmarks.gpu.throughput import throughput
from benchmarks.gpu.versions import versions

ROOT = Path(__file__).parents[2]
RESERVE_S = 10.0  # a section begins nothing new so long before its end


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    limit_s: float
    rows: Callable[[GpuEnvironment], Iterator[Row]]


SECTIONS = (
    Section("versions", 50.0, versions),
    Section("conformance", 250.0, conformance),
    Section("parity", 130.0, parity),
    Section("throughput", 90.0, throughput),
    Section("bandwidth", 50.0, bandwidth),
)


def section_of(name: str) -> Section:
    return next(section for section in SECTIONS if section.name == name)


def countdown(seconds: float, clock: Callable[[], float] = time.monotonic) -> Callable[[], float]:
    end = clock() + seconds
    return lambda: end - clock()


def rows_of(section: Section, environment: GpuEnvironment) -> Iterator[Row]:
    """Those of the section; one more when it breaks."""
    try:
        yield from section.rows(environment)
    except Exception as error:
        yield Row(section.name, "failed", f"{type(error).__name__}: {first_line(error)}")


def run_in_child(section: Section, command: Sequence[str]) -> list[Row]:
    """What `command` prints of the section; it and its own children are stopped after the section's time."""
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        ) as child:
            try:
                output, problem = child.communicate(timeout=section.limit_s)[0], ""
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                output, problem = child.communicate()[0], f"stopped after {section.limit_s:.0f} s"
        errors.seek(0)
        said = errors.read()
    if not problem and child.returncode:
        last = said.strip().rpartition("\n")[2] or "it said nothing"
        problem = f"the process ended with code {child.returncode}: {last}"
    rows = [row for row in map(Row.from_line, output.splitlines()) if row is not None]
    if not rows and not problem:
        problem = "it gave no row"
    if problem:
        rows.append(Row(section.name, "failed", problem))
    if any(row.verdict == "failed" for row in rows):
        print(said, file=sys.stderr)
    return rows
