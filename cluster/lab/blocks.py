"""`kvray lab blocks`: the life of a few KV blocks, step by step, on the classes that serve requests.

No model runs: who holds which block does not depend on what is written into it.

Owns: the story: two requests with one beginning, a fork inside a block, its first write, the ends, an eviction.
Does not: draw (block_picture) or keep books (BlockManager, BlockPool and RadixTree do, as in a worker).
Invariants: every number in a scene is read from the production classes, and their invariants hold after every scene.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console

from cluster.core.hashing import RouteScheme
from cluster.lab.block_picture import draw
from worker.kvcache.block_journal import BlockEntry, BlockJournal
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.radix_tree import RadixTree

BLOCK_SIZE = 16
NUM_BLOCKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What one step did. `refs` and `cached` are by block, `tables` and `lengths` (in tokens) by sequence."""

    title: str
    why: str
    refs: tuple[int, ...]
    cached: tuple[bool, ...]
    tables: dict[str, tuple[int, ...]]
    lengths: dict[str, int]
    entries: tuple[BlockEntry, ...]


def run_blocks(console: Console | None = None) -> int:
    console = console or Console()
    console.print(
        f"{NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens. Letters say who holds a block; 'idle' is held by nobody "
        "but can be found by its tokens; '.' is free.",
        highlight=False,
    )
    for number, scene in enumerate(scenes(), start=1):
        draw(scene, number, console)
    return 0


def scenes() -> Iterator[Scene]:
    stage = Stage()
    a = list(range(1000, 1050))
    stage.start("A", a)
    yield stage.scene(
        "A arrives with 50 tokens",
        "50 tokens need 4 blocks of 16, taken when they are needed and not at the longest possible length; "
        "the last one has 14 slots left.",
    )
    shared = stage.start("C", [*a[:32], *range(2000, 2008)])
    yield stage.scene(
        "C arrives with the same first 32 tokens and 8 others",
        f"The radix tree finds {shared} tokens, so C shares A's blocks 0 and 1 (one holder more each), "
        "computes 8 tokens instead of 40 and takes one block for them.",
    )
    stage.fork("A", "B", 30)
    yield stage.scene(
        "B is forked from A at token 30",
        "A fork copies nothing: B holds block 0 and block 1 as well, and never A's blocks 2 and 3, "
        "which begin behind token 30.",
    )
    stage.write("B", [3000])
    source, copy = stage.copies[-1]
    yield stage.scene(
        "B writes its first own token, number 30",
        f"It belongs into block {source}, which others read, so B gets a copy, block {copy}, and writes there: "
        "copy-on-write, for one block and not for the whole prefix.",
    )
    stage.write("B", [3001, 3002])
    yield stage.scene(
        "B writes two more tokens",
        f"Token 31 goes into block {copy}, which is B's alone now; then that block is full, "
        "and token 32 needs a new one.",
    )
    stage.write("A", [1050])
    yield stage.scene(
        "A writes token 50",
        "A is the only holder of its last block, and the slot behind the prompt is still empty, so it writes in place.",
    )
    stage.free("A")
    yield stage.scene(
        "A ends",
        "Blocks 0 and 1 lose one holder; blocks 2 and 3 lose the last one and become idle: "
        "their KV is still right and can be found.",
    )
    stage.free("B")
    stage.free("C")
    yield stage.scene("B and C end", "Nobody holds a block any more, yet all stay until somebody needs the room.")
    stage.start("D", list(range(4000, 4064)))
    evicted = sorted(entry.block for entry in stage.fresh_entries() if entry.action == "evict")
    yield stage.scene(
        "D arrives with 64 new tokens",
        f"It needs 4 blocks and one is free, so blocks {_and(evicted)} are evicted: ends of branches, longest unused "
        "first, because a block is of no use without all blocks before it.",
    )
    stage.free("D")
    found = stage.manager.cached_prefix([*a, 0])
    yield stage.scene("D ends", f"If A's prompt came again now, {found} of its 50 tokens would be found.")


class Stage:
    """A manager as a worker has it, with every write carried out at once."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, block_size: int = BLOCK_SIZE) -> None:
        self._entries: list[BlockEntry] = []
        self._pool = BlockPool(num_blocks)
        scheme = RouteScheme(tokenizer_revision="lab", model_revision="lab", chunk_tokens=4 * block_size)
        tree = RadixTree(self._pool, block_size, chunk_blocks=4)
        journal = BlockJournal(self._entries.append)
        self.manager = BlockManager(self._pool, tree, block_size, scheme, journal=journal)
        self.copies: list[tuple[int, int]] = []
        self._tokens: dict[str, list[int]] = {}
        self._told = 0

    def start(self, name: str, tokens: list[int]) -> int:
        """Returns the tokens that need not be computed."""
        cached = self.manager.allocate(name, tokens)
        assert cached is not None, f"no room for {name}"
        self._tokens[name] = list(tokens)
        self._compute(name, cached, tail=True)
        return cached

    def fork(self, parent: str, child: str, at: int) -> None:
        self.manager.fork(parent, child, at)
        self._tokens[child] = self._tokens[parent][:at]

    def write(self, name: str, tokens: list[int]) -> None:
        for token in tokens:
            start = len(self._tokens[name])
            assert self.manager.append_token(name, start + 1), f"no room for {name}"
            self._tokens[name].append(token)
            self._compute(name, start)

    def free(self, name: str) -> None:
        self.manager.free(name)
        del self._tokens[name]

    def fresh_entries(self) -> list[BlockEntry]:
        return self._entries[self._told :]

    def scene(self, title: str, why: str) -> Scene:
        """Ends a step."""
        self.manager.check_invariants()
        entries = tuple(self.fresh_entries())
        self._told = len(self._entries)
        self.manager.end_step()
        blocks = range(self._pool.num_blocks)
        return Scene(
            title=title,
            why=why,
            refs=tuple(self._pool.ref_count(b) for b in blocks),
            cached=tuple(self._pool.is_cached(b) for b in blocks),
            tables={name: tuple(self.manager.get_block_ids(name)) for name in sorted(self._tokens)},
            lengths={name: len(tokens) for name, tokens in self._tokens.items()},
            entries=entries,
        )

    def _compute(self, name: str, start: int, *, tail: bool = False) -> None:
        tokens = self._tokens[name]
        self.copies += self.manager.take_copies()
        self.manager.check_writable(name, start, len(tokens))
        self.manager.commit(name, tokens, len(tokens), tail=tail)


def _and(numbers: list[int]) -> str:
    words = [str(number) for number in numbers]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
