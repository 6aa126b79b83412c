"""`kvray bench`: start what has to be started, run the session, show and write the results.

Owns: the order of these steps, and what the user sees.
Does not: measure or compute (session and the modules below it).
Invariants: everything started here is stopped, also after a failure or Ctrl-C; what was measured until then is shown
and written; a mistake in the options, or a peer that cannot be used, is one line and exit code 2.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.bench.background_load import BackgroundLoad
from cluster.bench.bench_options import BenchOptions, read_options
from cluster.bench.lineup import assemble
from cluster.bench.machine import describe_machine
from cluster.bench.machine_probe import MachineProbe
from cluster.bench.model_costs import ModelCosts
from cluster.bench.plot import require_matplotlib
from cluster.bench.report import number, to_rich
from cluster.bench.results import Results
from cluster.bench.run_meter import RunMeter
from cluster.bench.run_record import RunRecord
from cluster.bench.session import Session, SessionSettings
from cluster.bench.word_list import single_token_words
from cluster.core.errors import ConfigError
from cluster.progress import resolve_with_progress
from cluster.tokenizer import Tokenizer

_SHOWN = (("wall", "wall_s"), ("out tok/s", "out_tps"), ("TTFT", "ttft_median_s"), ("cached", "cached_tokens"))


def run_bench(given: Mapping[str, Any]) -> int:
    """`given`: the command's parameters by name."""
    console = Console(stderr=True)
    try:
        options = read_options(given)
        if options.png is not None:
            require_matplotlib()
        with ended_by_signals():
            results = asyncio.run(_bench(options, console))
        _show(results)
        results.write(json_file=options.json, markdown=options.markdown, png=options.png)
    except ConfigError as error:
        _say(console, f"kvray: {error.message}")
        return 2
    except KeyboardInterrupt:  # before the first run, or a second time
        return 1
    return 0 if any(summary.kept for summary in results.summaries) else 1


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM, and SIGINT also in a background job, which ignores it, end a run as Ctrl-C does: children stop."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda _number, _frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _bench(options: BenchOptions, console: Console) -> Results:
    model_dir = resolve_with_progress(options.engine_config.model, console)
    words = single_token_words(Tokenizer.from_dir(model_dir))
    probe = MachineProbe(_costs(model_dir), options.engine_config.threads or 1)
    async with AsyncExitStack() as stack:
        peers = await assemble(options, model_dir, stack, lambda line: _say(console, line))
        meter = RunMeter(peers)
        facts = [replace(peer.facts, ready_rss=meter.memory(peer.facts.pid)) for peer in peers]
        if not meter.sees_all:
            _say(console, "noise is unknown: give --pid NAME=PID for each server of this machine")
        for workload in (w for w in options.workloads if not w.caching):
            for peer in (p for p in peers if not p.can_defeat_cache):
                _say(console, f"{workload.name} leaves out {peer.facts.name}: no request can switch its cache off")
        session = Session(
            peers,
            options.workloads,
            words,
            _settings(options),
            meter,
            load=None if options.background_load is None else BackgroundLoad(options.background_load),
            before_repetition=probe.read,
            on_record=lambda record: _say(console, _line(record)),
        )
        _say(console, "warming up")
        await session.warm_up()
        await session.run()
        if not session.interrupted:
            await probe.read()
    return Results(
        note=describe_machine(sys.argv[1:]),
        peers=facts,
        records=session.records,
        probe=probe,
        interrupted=session.interrupted,
    )


def _settings(options: BenchOptions) -> SessionSettings:
    return SessionSettings(
        salt=secrets.token_hex(8),
        repetitions=options.repetitions,
        max_noise=options.max_noise,
        quiet_wait_s=options.quiet_wait_s,
        retries=options.retries,
        time_limit_s=options.time_limit_s,
    )


def _costs(model_dir: Path) -> ModelCosts | None:
    try:
        return ModelCosts.from_config(json.loads((model_dir / "config.json").read_text()))
    except (OSError, ValueError):
        return None


def _line(record: RunRecord) -> str:
    """One run, as it ends."""
    figures = []
    for label, name in _SHOWN:
        value = record.figures.get(name)
        figures += [f"{label} {number(value)}"] if isinstance(value, int | float) else []
    noise = "unknown" if record.usage.noise is None else f"{record.usage.noise:.2f}"
    outcome = record.reason or ", ".join([*figures, f"noise {noise}"])
    place = f"{record.repetition + 1} {record.workload:<7}{record.peer:<12}"
    return f"{place}{record.verdict:<7} {outcome}"


def _show(results: Results) -> None:
    console = Console()
    for table in results.tables():
        console.print(to_rich(table))
        console.print()
    if results.interrupted:
        console.print(results.interrupted, highlight=False, markup=False)
    console.print(results.note.text(), highlight=False, markup=False)


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
