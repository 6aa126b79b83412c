"""Section `conformance`: the kernel tests that need a device, in a child process, counted per attention backend.

Owns: the command, and reading pytest's verbose lines.
Does not: hold tests (tests/worker/kernels does).
Invariants: a run that is stopped, fails or tests nothing is no success; what finished before is counted.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.environment import GpuEnvironment
from benchmarks.gpu.report import Row

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider", "--color=no")
FOLDER = "tests/worker/kernels"
BACKENDS = ("flash", "triton", "reference")
RESERVE_S = 5.0  # for what comes after the child

_LINE = re.compile(r"^\S*?(\w+)\.py::(\w+)(\[.*\])? (PASSED|FAILED|ERROR|SKIPPED)")
Run = Callable[[Sequence[str], float], tuple[str, int | None]]


def run_pytest(command: Sequence[str], limit_s: float) -> tuple[str, int | None]:
    """All that it printed, and the exit code; None when it had to be stopped."""
    env = {**os.environ, "COLUMNS": "300", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # products are deterministic there
    with subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as child:
        try:
            return child.communicate(timeout=limit_s)[0], child.returncode
        except subprocess.TimeoutExpired:
            child.kill()
            return child.communicate()[0], None


def conformance(environment: GpuEnvironment, run: Run = run_pytest) -> Iterator[Row]:
    if importlib.util.find_spec("pytest") is None:
        yield Row("kernel tests", "skipped", "pytest is not installed; `make install` installs it")
        return
    limit_s = environment.left() - RESERVE_S
    output, code = run((*COMMAND, FOLDER), limit_s)
    yield from counts(output.splitlines())
    if code is None:
        yield Row("kernel tests", "failed", f"stopped after {limit_s:.0f} s")
    elif code != 0:
        said = [line for line in output.splitlines() if line.strip()]
        yield Row("kernel tests", "failed", f"pytest ended with code {code}: {said[-1] if said else 'it said nothing'}")
    if code != 0:
        print(output, file=sys.stderr)


def counts(lines: Iterable[str]) -> Iterator[Row]:
    """One row per backend, with the names of the first tests that failed."""
    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    wrong: defaultdict[str, list[str]] = defaultdict(list)
    for line in lines:
        match = _LINE.match(line)
        if match is not None:
            file, test, parameters, outcome = match.groups(default="")
            backend = backend_of(file, parameters)
            outcomes[backend][outcome.lower()] += 1
            if outcome in ("FAILED", "ERROR"):
                wrong[backend].append(test + parameters)
    for backend, found in outcomes.items():
        text = ", ".join(f"{number} {outcome}" for outcome, number in sorted(found.items()))
        if wrong[backend]:
            yield Row(f"{backend} kernels", "failed", f"{text}: {', '.join(wrong[backend][:3])}")
        else:
            yield Row(f"{backend} kernels", "ok" if found["passed"] else "skipped", text)


def backend_of(file: str, parameters: str) -> str:
    """The backend that comes first in the parameters, else in the file's name."""
    for word in (*re.split(r"\W+", parameters)[1:2], *file.split("_")):
        if word in BACKENDS:
            return word
    return "other"
