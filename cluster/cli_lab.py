"""`kvray lab`: the claims about paged KV memory and prefix caching, measured on this machine.

Owns: these commands' names, arguments and help.
Does not: do the work; each command hands over to one module, imported only when it runs.
Invariants: as cluster.cli; every experiment of cluster.lab.experiments is a command, and `all` runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli_options import Model, PartialReuse, run_command
from cluster.lab.experiments import EXPERIMENTS

Out = Annotated[Path | None, typer.Option(help="folder of the report [default: lab-report, or lab-report/NAME]")]
Json = Annotated[bool, typer.Option("--json", help="print the report as one JSON object")]
Short = Annotated[bool, typer.Option("--short", help="seconds instead of minutes; its figures are no measurements")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads (default: all cores)")]
Seed = Annotated[int, typer.Option(help="of the workloads")]

lab = typer.Typer(no_args_is_help=True, help="Measure what paged KV memory and prefix caching do, on this machine.")
journal = typer.Typer(help="Record what happens to the KV blocks, and compare recordings.")
lab.add_typer(journal, name="journal")


def _command(names: Sequence[str], folder: Path) -> Callable[..., None]:
    """A command that runs these experiments, by default into `folder`."""

    def command(
        model: Model = "demo",
        out: Out = None,
        short: Short = False,
        threads: Threads = None,
        seed: Seed = 0,
        json: Json = False,
    ) -> None:
        _run(names, model, out or folder, short, threads, seed, as_json=json)

    return command


_FOLDER = Path("lab-report")

lab.command(
    name="all",
    help="Run every experiment (up to ten minutes) and write one report: the claims first, then tables and charts.",
)(_command(list(EXPERIMENTS), _FOLDER))

for _name, _entry in EXPERIMENTS.items():
    if _name not in ("blocks", "journal"):
        lab.command(name=_name, help=_entry.help)(_command([_name], _FOLDER / _name))


@lab.command()
def blocks() -> None:
    """Draw block tables step by step: share, fork, copy-on-write, free, evict. Needs no model."""
    from cluster.lab.blocks import run_blocks

    run_command(run_blocks)


@journal.callback(invoke_without_command=True)
def compare_journals(
    context: typer.Context,
    model: Model = "demo",
    out: Out = None,
    short: Short = False,
    threads: Threads = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Compare the block journals of two runs; with record or diff, those of files."""
    if context.invoked_subcommand is None:
        _command(["journal"], _FOLDER / "journal")(model, out, short, threads, seed, json)


@journal.command()
def record(
    file: Annotated[Path, typer.Argument(help="file to write, one JSON object a line", dir_okay=False)],
    partial_reuse: PartialReuse = True,
) -> None:
    """Run a small fixed workload and write its block journal."""
    from cluster.lab.journal import run_record

    run_command(run_record, file, partial_reuse=partial_reuse)


JournalFile = Annotated[Path, typer.Argument(help="a recorded journal", exists=True, dir_okay=False)]


@journal.command()
def diff(a: JournalFile, b: JournalFile) -> None:
    """Print the first difference of two journals (exit code 1), or say that they are equal (0)."""
    from cluster.lab.journal import run_diff

    run_command(run_diff, a, b)


def _run(
    names: Sequence[str], model: str, out: Path, short: bool, threads: int | None, seed: int, *, as_json: bool
) -> None:
    from cluster.lab.lab_run import LabOptions, run_lab

    options = LabOptions(model=model, out=out, short=short, threads=threads, seed=seed)
    run_command(run_lab, names, options, as_json=as_json)
