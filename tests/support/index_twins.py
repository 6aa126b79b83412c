"""An index beside the most obvious one, for property tests.

Owns: a small forest of chunks, the operations on it, SetsOracle, and Twins, which does an operation to both.
Does not: assert what lookups answer; that differs with and without holes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, WorkerId
from cluster.index.memory import MemoryIndex

WORKERS = A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
E1, E2 = Epoch(1), Epoch(2)
CLEARED = CacheEvent(CacheEventKind.CLEARED)

_PARENTS = [None, 0, 1, 2, 2, 4, 1, 6, None, 8, 9, 8]  # a forest: chunk -> the chunk before it
CHUNKS = [ChunkHash(bytes([17 * number]) * 16) for number in range(len(_PARENTS))]


def stored(*chunks: ChunkHash) -> CacheEvent:
    return CacheEvent(CacheEventKind.STORED, chunks)


def removed(*chunks: ChunkHash) -> CacheEvent:
    return CacheEvent(CacheEventKind.REMOVED, chunks)


def _path_to(number: int) -> list[ChunkHash]:
    parent = _PARENTS[number]
    return [*(_path_to(parent) if parent is not None else []), CHUNKS[number]]


PATHS = [_path_to(number) for number in range(len(_PARENTS))]
_CHILDREN = {
    chunk: {CHUNKS[child] for child, parent in enumerate(_PARENTS) if parent == number}
    for number, chunk in enumerate(CHUNKS)
}

_workers = st.sampled_from(WORKERS)
_epochs = st.sampled_from([E1, E2, Epoch(3)])
_prompt = st.tuples(st.just("prompt"), _workers, st.sampled_from(PATHS))
_evict = st.tuples(st.just("evict"), _workers, st.lists(st.integers(0, 99), min_size=1, max_size=6))
_lives = st.one_of(
    st.tuples(st.just("add_worker"), _workers, _epochs),
    st.tuples(st.just("drop_worker"), _workers),
    st.tuples(st.just("apply"), _workers, _epochs, st.just([CLEARED])),
    st.tuples(st.just("sweep"), st.integers(0, 3000)),
)
cache_work = _prompt | _evict  # keeps what is held closed under prefix, as a replica does
closed_operations = cache_work | _lives
any_operations = _lives | st.tuples(
    st.just("apply"),
    _workers,
    _epochs,
    st.lists(
        st.builds(
            CacheEvent,
            st.sampled_from([CacheEventKind.STORED, CacheEventKind.STORED, CacheEventKind.REMOVED]),
            st.lists(st.sampled_from(CHUNKS), max_size=6).map(tuple),
        ),
        min_size=1,
        max_size=4,
    ),
)


class SetsOracle:
    """What an index must answer, in the most obvious form."""

    def __init__(self) -> None:
        self.lives: dict[WorkerId, tuple[Epoch, set[ChunkHash]]] = {}

    def add_worker(self, worker_id: WorkerId, epoch: Epoch) -> None:
        if worker_id not in self.lives or self.lives[worker_id][0] < epoch:
            self.lives[worker_id] = (epoch, set())

    def drop_worker(self, worker_id: WorkerId) -> None:
        self.lives.pop(worker_id, None)

    def apply(self, worker_id: WorkerId, epoch: Epoch, events: Sequence[CacheEvent]) -> None:
        if worker_id not in self.lives or self.lives[worker_id][0] != epoch:
            return
        held = self.lives[worker_id][1]
        for event in events:
            if event.kind is CacheEventKind.STORED:
                held.update(event.chunk_hashes)
            elif event.kind is CacheEventKind.REMOVED:
                held.difference_update(event.chunk_hashes)
            else:
                held.clear()

    def overlaps(self, prompt: Sequence[ChunkHash]) -> dict[WorkerId, int]:
        found = {}
        for worker_id, (_, held) in self.lives.items():
            depth = 0
            while depth < len(prompt) and prompt[depth] in held:
                depth += 1
            if depth:
                found[worker_id] = depth
        return found


class Twins:
    """An index and its oracle that live the same life. What an operation names need not exist."""

    def __init__(self) -> None:
        self.index, self.oracle = MemoryIndex(), SetsOracle()
        self.log: list[tuple[WorkerId, CacheEvent]] = []
        for worker_id in (A, B):
            self.do("add_worker", worker_id, E1)

    def held(self, worker_id: WorkerId) -> set[ChunkHash]:
        life = self.oracle.lives.get(worker_id)
        return set() if life is None else life[1]

    def do(self, name: str, *arguments: Any) -> None:
        if name == "prompt":
            worker_id, path = arguments
            self._publish(worker_id, stored(*path))
        elif name == "evict":
            self._publish(arguments[0], removed(*self._leaves(*arguments)))
        elif name == "sweep":
            self.index.sweep(*arguments)
        else:
            getattr(self.index, name)(*arguments)
            getattr(self.oracle, name)(*arguments)
        assert self.index.live() == {worker_id: life[0] for worker_id, life in self.oracle.lives.items()}
        for worker_id in WORKERS:
            assert self.index.chunk_count(worker_id) == len(self.held(worker_id))

    def _publish(self, worker_id: WorkerId, event: CacheEvent) -> None:
        if worker_id in self.oracle.lives:
            self.do("apply", worker_id, self.oracle.lives[worker_id][0], [event])
            self.log.append((worker_id, event))

    def _leaves(self, worker_id: WorkerId, choices: list[int]) -> list[ChunkHash]:
        """Leaves to evict one after the other: a child before its parent."""
        held, gone = set(self.held(worker_id)), []
        for choice in choices:
            leaves = [chunk for chunk in CHUNKS if chunk in held and not _CHILDREN[chunk] & held]
            if leaves:
                gone.append(leaves[choice % len(leaves)])
                held.remove(gone[-1])
        return gone
