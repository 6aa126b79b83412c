"""`kvray lab journal`: record the block journal of a fixed workload, and compare two recordings.

Change the pool, the manager or the prefix cache, record again, and see at which entry the two versions part.

Owns: the workload, and the files: one JSON object per entry.
Does not: run a model (what is written into a block does not matter here) or know what an entry means (block_journal).
Invariants: the workload depends on nothing but its seed; block numbers in a file are canonical; what is read is what
was written.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from rich.console import Console

from cluster.core.errors import ConfigError
from cluster.core.hashing import RouteScheme
from worker.kvcache.block_journal import BlockAction, BlockEntry, BlockJournal, canonical, diff
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.radix_tree import RadixTree

BLOCK_SIZE = 16
NUM_BLOCKS = 48
STEPS = 80
LONGEST = 200  # tokens; three such sequences fit


def run_record(path: Path, *, partial_reuse: bool) -> int:
    entries = record(partial_reuse=partial_reuse)
    try:
        path.write_text("".join(json.dumps(_to_wire(entry)) + "\n" for entry in canonical(entries)))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    Console().print(f"{len(entries)} entries written to {path}", highlight=False, markup=False, soft_wrap=True)
    return 0


def run_diff(a: Path, b: Path) -> int:
    ours, theirs = read(a), read(b)
    difference = diff(ours, theirs)
    text = f"equal: {len(ours)} entries" if difference is None else str(difference)
    Console().print(text, highlight=False, markup=False, soft_wrap=True)
    return 0 if difference is None else 1


def record(
    *, partial_reuse: bool = True, seed: int = 0, manager_class: type[BlockManager] = BlockManager, check: bool = True
) -> list[BlockEntry]:
    """Requests of three kinds come, grow, fork and end in a pool that is too small for all of them.

    `manager_class`: a changed one, to compare with.  `check`: let a broken invariant raise.
    """
    entries: list[BlockEntry] = []
    pool = BlockPool(NUM_BLOCKS)
    tree = RadixTree(pool, BLOCK_SIZE, chunk_blocks=4, partial=partial_reuse)
    scheme = RouteScheme(tokenizer_revision="lab", model_revision="lab", chunk_tokens=4 * BLOCK_SIZE)
    manager = manager_class(pool, tree, BLOCK_SIZE, scheme, journal=BlockJournal(entries.append))
    workload = _Workload(manager, random.Random(seed))
    for _ in range(STEPS):
        workload.step()
        if check:
            manager.check_invariants()
        manager.end_step()
    return entries


def read(path: Path) -> list[BlockEntry]:
    entries: list[BlockEntry] = []
    try:
        for line in path.read_text().splitlines():
            wire = json.loads(line)
            entries.append(BlockEntry(**{**wire, "action": BlockAction(wire["action"])}))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"line {len(entries) + 1} of {path} is no journal entry") from None
    return entries


def _to_wire(entry: BlockEntry) -> dict[str, object]:
    return {name: value for name, value in entry._asdict().items() if value is not None}


class _Workload:
    """`step` does what one engine step does: admit, grow every sequence by a token, sometimes fork or end one."""

    def __init__(self, manager: BlockManager, rng: random.Random) -> None:
        self._manager = manager
        self._rng = rng
        self._running: dict[str, list[int]] = {}
        self._names = 0

    def step(self) -> None:
        if self._rng.random() < 0.6:
            self._admit()
        for name in list(self._running):
            self._grow(name)
        if self._running and self._rng.random() < 0.3:
            self._fork(self._rng.choice(list(self._running)))
        if self._running and self._rng.random() < 0.4:
            self._end(self._rng.choice(list(self._running)))

    def _admit(self) -> None:
        kind, length = self._rng.randrange(3), self._rng.randrange(20, 120)
        start = 10_000 * kind
        tokens = [*range(start, start + length), *(self._rng.randrange(1000) for _ in range(10))]
        name = self._name()
        if self._manager.allocate(name, tokens, spare_blocks=len(self._running)) is None:
            return
        self._running[name] = tokens
        self._manager.take_copies()
        self._manager.commit(name, tokens, len(tokens), tail=True)

    def _grow(self, name: str) -> None:
        """By one token; a sequence that gets no block, or is too long, ends."""
        tokens = self._running[name]
        if len(tokens) >= LONGEST or not self._manager.append_token(name, len(tokens) + 1):
            self._end(name)
            return
        self._manager.take_copies()
        tokens.append(self._rng.randrange(1000))
        self._manager.commit(name, tokens, len(tokens))

    def _fork(self, parent: str) -> None:
        name, at = self._name(), self._rng.randrange(1, len(self._running[parent]) + 1)
        self._manager.fork(parent, name, at)
        self._running[name] = self._running[parent][:at]

    def _end(self, name: str) -> None:
        self._manager.free(name)
        del self._running[name]

    def _name(self) -> str:
        self._names += 1
        return f"r{self._names}"
