"""draw: one scene of `kvray lab blocks` as text, in colour on a terminal.

       block      0    1    2    3    4    5    6    7
       held by   ABC   AC   A    A    C    B    .    .
       refs       3    2    1    1    1    1    0    0
       table A   0 1 2 3   50 tokens

Owns: the picture.  Does not: know the story, or change anything it draws.
Invariants: the words are the same with and without colour, so a file says as much as a terminal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from cluster.lab.blocks import Scene

FREE, IDLE, SHARED = "dim", "black on yellow", "bold white on magenta"
OWN = ("white on blue", "black on green", "black on cyan", "white on red")
MARGIN = (0, 0, 0, 2)


def draw(scene: Scene, number: int, console: Console) -> None:
    parts: list[Text | Padding] = [
        Text(f"\nstep {number}: {scene.title}", style="bold"),
        Padding(Text(scene.why), MARGIN, expand=False),
        Padding(_pool(scene), MARGIN, expand=False),
        *(Padding(_table_line(scene, name), MARGIN, expand=False) for name in scene.tables),
        *(Padding(Text(f"journal  {entry}", style="dim"), MARGIN, expand=False) for entry in scene.entries),
    ]
    console.print(Group(*parts), highlight=False, markup=False)


def _pool(scene: Scene) -> Table:
    grid = Table.grid(padding=(0, 0))
    grid.add_column(width=9)
    for _ in scene.refs:
        grid.add_column(width=6, justify="center")
    blocks = range(len(scene.refs))
    grid.add_row("block", *(Text(str(b), style=_style(scene, b)) for b in blocks))
    grid.add_row("held by", *(Text(f"{_label(scene, b):^4}", style=_style(scene, b)) for b in blocks))
    grid.add_row("refs", *(str(refs) for refs in scene.refs))
    return grid


def _table_line(scene: Scene, name: str) -> Text:
    line = Text(f"table {name}  ")
    for block_id in scene.tables[name]:
        line.append(str(block_id), style=_style(scene, block_id))
        line.append(" ")
    return line.append(f"  {scene.lengths[name]} tokens")


def _holders(scene: Scene, block_id: int) -> list[str]:
    return [name for name, blocks in scene.tables.items() if block_id in blocks]


def _label(scene: Scene, block_id: int) -> str:
    return "".join(_holders(scene, block_id)) or ("idle" if scene.cached[block_id] else ".")


def _style(scene: Scene, block_id: int) -> str:
    holders = _holders(scene, block_id)
    if not holders:
        return IDLE if scene.cached[block_id] else FREE
    return SHARED if len(holders) > 1 else OWN[(ord(holders[0]) - ord("A")) % len(OWN)]
