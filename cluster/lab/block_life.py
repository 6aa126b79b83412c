"""blocks: the scenes of `kvray lab blocks` as an experiment: what the article says of block tables, read off them.

Owns: which scene answers which claim.
Does not: tell the story (cluster.lab.blocks) or draw (block_picture).
Invariants: every figure is read from a scene, whose numbers are those of the production classes.
"""

from __future__ import annotations

import io

from rich.console import Console

from cluster.lab.block_picture import draw
from cluster.lab.blocks import BLOCK_SIZE, NUM_BLOCKS, Scene, scenes
from cluster.lab.findings import Claim, Findings, LabContext, Verdict

WIDTH = 110


def run(_context: LabContext) -> Findings:
    told = list(scenes())
    arrives, shares, forks, writes = told[:4]
    return Findings(
        experiment="blocks",
        title="the life of a few blocks",
        summary=f"Four requests in {NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens, on the classes that serve requests; "
        "their invariants are checked after every step. `kvray lab blocks` draws this in colour.",
        claims=(_on_demand(arrives), _counted(shares, forks), _copied_once(forks, writes), _returns(told)),
        figures={
            "blocks.scenes": len(told),
            "blocks.first_table": len(arrives.tables["A"]),
            "blocks.shared_by_c": sum(refs > 1 for refs in shares.refs),
            "blocks.copied_at_write": _copies(writes),
        },
        text=_drawn(told),
    )


def _on_demand(scene: Scene) -> Claim:
    held, tokens = len(scene.tables["A"]), scene.lengths["A"]
    wanted = -(-tokens // BLOCK_SIZE)
    return Claim(
        section="2.1",
        claim="Blocks are taken on demand through a block table and need not be neighbours",
        expected=f"{tokens} tokens take {wanted} blocks of {BLOCK_SIZE}, not room for the longest request",
        measured=f"{held} blocks, {held * BLOCK_SIZE - tokens} slots of the last one empty",
        verdict=Verdict.CONFIRMED if held == wanted else Verdict.NOT_CONFIRMED,
    )


def _counted(shares: Scene, forks: Scene) -> Claim:
    counts = [scene.refs[scene.tables["A"][0]] for scene in (shares, forks)]
    return Claim(
        section="2.1",
        claim="One physical block can stand in several tables, counted by its references",
        expected="block 0 has 2 holders after C came and 3 after the fork, and was computed once",
        measured=f"{counts[0]}, then {counts[1]} holders; "
        f"{sum(block in shares.tables['A'] for block in shares.tables['C'])} of C's blocks are A's",
        verdict=Verdict.CONFIRMED if counts == [2, 3] else Verdict.NOT_CONFIRMED,
    )


def _copied_once(forks: Scene, writes: Scene) -> Claim:
    at_fork, at_write = _copies(forks), _copies(writes)
    return Claim(
        section="2.3",
        claim="Copy-on-write copies at the write and not at the fork",
        expected="no copy at the fork, one block at the first own token",
        measured=f"{at_fork} blocks copied at the fork, {at_write} at the write",
        verdict=Verdict.CONFIRMED if (at_fork, at_write) == (0, 1) else Verdict.NOT_CONFIRMED,
    )


def _returns(told: list[Scene]) -> Claim:
    held = sum(told[-1].refs)
    idle = sum(told[-1].cached)
    return Claim(
        section="2.3",
        claim="A block returns when its count is 0",
        expected="after all requests ended no block has a holder; those the cache knows stay findable",
        measured=f"{held} references, {idle} of {NUM_BLOCKS} blocks idle in the cache, "
        f"{NUM_BLOCKS - idle} on the free list",
        verdict=Verdict.CONFIRMED if held == 0 else Verdict.NOT_CONFIRMED,
    )


def _copies(scene: Scene) -> int:
    return sum(entry.action == "copy" for entry in scene.entries)


def _drawn(told: list[Scene]) -> str:
    page = io.StringIO()
    console = Console(file=page, width=WIDTH, color_system=None)
    for number, scene in enumerate(told, start=1):
        draw(scene, number, console)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())
