"""What kvray does on this machine's CUDA device, as a table to paste into an issue. At most ten minutes.

    make gpu-check                                      with the demo model if it is on disk, else with random models
    .venv/bin/python -m benchmarks.gpu_check --model DIRECTORY

    versions      device, driver, torch, packages, and which attention backends are possible
    conformance   the kernel tests that need a device
    parity        greedy answers against transformers, with every attention backend
    throughput    prefill and decode tokens per second of the model step
    bandwidth     KV bytes per second of decode attention, as a share of a copy

Exit code 0: nothing failed. 1: something did. 2: there is no CUDA device, or a wrong option.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu.environment import cuda_environment
from benchmarks.gpu.report import Row, exit_code, summary, table
from benchmarks.gpu.sections import RESERVE_S, SECTIONS, Section, countdown, rows_of, run_in_child, section_of
from benchmarks.gpu.versions import why_no_cuda
from cluster.core.errors import ConfigError
from cluster.model_source import DEMO_NAME, default_cache_dir, resolve_model

RunSection = Callable[[Section, Sequence[str]], list[Row]]


def main(
    arguments: Sequence[str] | None = None,
    run: RunSection = run_in_child,
    no_cuda: Callable[[], str | None] = why_no_cuda,
) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local model directory")
    parser.add_argument("--only", choices=[s.name for s in SECTIONS], help="one section")
    parser.add_argument("--rows", action="store_true", help="run it here and print rows as JSON, as a child does")
    options = parser.parse_args(arguments)
    if (reason := no_cuda()) is not None:
        print(f"gpu-check needs a CUDA device: {reason}")
        return 2
    try:
        model = model_on_disk(options.model)
    except ConfigError as error:
        print(f"gpu-check: --model: {error.message}")
        return 2
    sections = [section_of(options.only)] if options.only else SECTIONS
    if options.rows:
        return print_rows(sections, model)
    return check(sections, model, run)


def model_on_disk(wanted: str | None) -> Path | None:
    """The directory that was asked for, else the demo model where it has been made; nothing is fetched."""
    if wanted is not None:
        return resolve_model(str(Path(wanted).expanduser().absolute()))
    demo = default_cache_dir() / "models" / DEMO_NAME
    return demo if (demo / "config.json").is_file() else None


def print_rows(sections: Sequence[Section], model: Path | None) -> int:
    for section in sections:
        for row in rows_of(section, cuda_environment(model, countdown(section.limit_s - RESERVE_S))):
            print(row.to_line(), flush=True)
    return 0


def check(sections: Sequence[Section], model: Path | None, run: RunSection) -> int:
    started, results = time.monotonic(), []
    for section in sections:
        print(f"gpu-check: {section.name}, at most {section.limit_s:.0f} s", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--only", section.name, "--rows"]
        results.append((section.name, run(section, command + (["--model", str(model)] if model else []))))
    print(f"{table(results)}\n\n{summary(results, time.monotonic() - started)}")
    return exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
