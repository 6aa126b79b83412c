"""`kvray lab`: experiments that show how KV memory is shared.

Owns: these commands' names, arguments and help.
Does not: do the work; each command hands over to one module, imported only when it runs.
Invariants: as cluster.cli.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli_options import PartialReuse, run_command

lab = typer.Typer(no_args_is_help=True, help="Experiments that show how KV memory is shared.")
journal = typer.Typer(no_args_is_help=True, help="Record what happens to the KV blocks, and compare recordings.")
lab.add_typer(journal, name="journal")


@lab.command()
def blocks() -> None:
    """Draw block tables step by step: share, fork, copy-on-write, free, evict. Needs no model."""
    from cluster.lab.blocks import run_blocks

    run_command(run_blocks)


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
