"""SpeculativeIndex: what replicas will hold soon, because this router has just sent them the prompts.

    routed --> queued or prefilling --> prefilled --linger--> gone      (its events have come by then, or never will)
                        \\--> withdrawn: refused, cancelled, moved: nothing will be cached
                        \\--> the life ended

Prompts are kept in a radix tree whose edges are slices of them. A chunk hash names everything before it, so where two
prompts part is found by bisection, and a lookup costs a few steps however long or alike the prompts are:

    root -- system prompt [0:64] {a: 9, b: 2} -- tail [64:70] {a: 1}
                                              \\- tail [64:65] {a: 1}

Owns: the entries, their ends, and the overlap they promise.
Does not: know what replicas really hold (memory), or decide who is routed where.
Invariants: an entry belongs to one live (worker, epoch); a request has at most one; every node lies on the way of an
entry, and one with a single child is the end of an entry; memory is bounded by `max_chunks`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.core.hashing import ChunkHash
from cluster.core.replica import Epoch, WorkerId

LINGER_S = 2.0
MAX_CHUNKS = 1 << 18  # about 15 MB of hashes

Path = Sequence[ChunkHash]


@dataclass(slots=True, eq=False)
class _Node:
    """The edge path[start:end] and what hangs below it.

    holders: by worker, the entries that pass or end here.  ends: those that end here.
    """

    path: Path
    start: int
    end: int
    parent: _Node | None
    children: dict[ChunkHash, _Node] = field(default_factory=dict)
    holders: dict[WorkerId, int] = field(default_factory=dict)
    ends: int = 0


@dataclass(slots=True, eq=False)
class _Entry:
    request_id: str
    worker_id: WorkerId
    node: _Node
    expires_at: float | None = None  # None: not prefilled yet


class SpeculativeIndex:
    """Of one router, used on its event loop. `clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float], *, linger_s: float = LINGER_S, max_chunks: int = MAX_CHUNKS) -> None:
        self._clock = clock
        self._linger_s = linger_s
        self._max_chunks = max_chunks
        self._root = _Node((), 0, 0, None)
        self._entries: dict[str, _Entry] = {}
        self._lingering: deque[_Entry] = deque()  # in the order of their ends; entries that ended early stay until then
        self._epochs: dict[WorkerId, Epoch] = {}
        self._chunks = 0
        self._routed = self._withdrawn = self._expired = self._crowded_out = 0

    def routed(self, request_id: str, worker_id: WorkerId, epoch: Epoch, chunk_hashes: Path) -> None:
        """The request is on its way to (worker, epoch). Replaces what was said of it; a higher epoch ends the lower."""
        self._remove(self._entries.get(request_id))
        known = self._epochs.get(worker_id, epoch)
        if epoch < known or not 0 < len(chunk_hashes) <= self._max_chunks:
            return
        if epoch > known:
            self.end_life(worker_id)
        self._epochs[worker_id] = epoch
        self._routed += 1
        self._entries[request_id] = _Entry(request_id, worker_id, self._insert(worker_id, chunk_hashes))
        self._chunks += len(chunk_hashes)
        self._expire()
        while self._chunks > self._max_chunks:
            self._crowded_out += 1
            self._remove(self._oldest())

    def prefilled(self, request_id: str) -> None:
        """All of its prompt is in the replica's cache now; the events that say so are on their way."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.expires_at is None:
            entry.expires_at = self._clock() + self._linger_s
            self._lingering.append(entry)

    def withdraw(self, request_id: str) -> None:
        """The request will not be prefilled there (any more). Changes nothing once it is prefilled."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.expires_at is None:
            self._withdrawn += 1
            self._remove(entry)

    def end_life(self, worker_id: WorkerId) -> None:
        """The worker's cache is gone, or the worker is."""
        self._epochs.pop(worker_id, None)
        for entry in [entry for entry in self._entries.values() if entry.worker_id == worker_id]:
            self._remove(entry)

    def carry_over(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """The same process goes on under another epoch, with its cache and its requests."""
        if worker_id in self._epochs:
            self._epochs[worker_id] = epoch

    def overlaps(self, chunk_hashes: Path) -> dict[WorkerId, int]:
        """Worker -> number of leading chunks it will hold, for every worker with at least one."""
        self._expire()
        found: dict[WorkerId, int] = {}
        node, depth, count = self._root, 0, len(chunk_hashes)
        while depth < count:
            child = node.children.get(chunk_hashes[depth])
            if child is None:
                break
            depth = _parting(chunk_hashes, child.path, depth, min(count, child.end))
            for worker_id in child.holders:
                found[worker_id] = depth
            if depth < child.end:
                break
            node = child
        return found

    def num_sharing(self, chunk_hashes: Path, depth: int) -> int:
        """Entries that begin with the first `depth` chunks."""
        self._expire()
        node, reached = self._root, 0
        while reached < depth:
            child = node.children.get(chunk_hashes[reached])
            if child is None:
                return 0
            reached = _parting(chunk_hashes, child.path, reached, min(depth, child.end))
            if reached < min(depth, child.end):
                return 0
            node = child
        return sum(node.holders.values())

    def snapshot(self) -> dict[str, float]:
        """Gauges and counters by metric name."""
        self._expire()
        return {
            "kvray_index_speculative_entries": len(self._entries),
            "kvray_index_speculative_chunks": self._chunks,
            "kvray_index_speculative_routed": self._routed,
            "kvray_index_speculative_withdrawn": self._withdrawn,
            "kvray_index_speculative_expired": self._expired,
            "kvray_index_speculative_crowded_out": self._crowded_out,
        }

    def check_invariants(self) -> None:
        """Compare the tree with the entries in full, for tests."""
        passes: dict[int, dict[WorkerId, int]] = {}
        ends: dict[int, int] = {}
        for entry in self._entries.values():
            node: _Node = entry.node
            ends[id(node)] = ends.get(id(node), 0) + 1
            while node.parent is not None:
                assert node.parent.children[node.path[node.start]] is node
                assert tuple(node.parent.path[: node.start]) == tuple(node.path[: node.start])
                counts = passes.setdefault(id(node), {})
                counts[entry.worker_id] = counts.get(entry.worker_id, 0) + 1
                node = node.parent
        nodes = list(self._root.children.values())
        for node in nodes:
            nodes.extend(node.children.values())
            assert node.start < node.end, "an empty edge"
            assert node.holders == passes.pop(id(node)), "holders are not the entries that pass"
            assert node.ends == ends.get(id(node), 0)
            assert node.ends or len(node.children) != 1, "a node that only lengthens the way"
        assert not passes
        assert self._chunks == sum(entry.node.end for entry in self._entries.values()) <= self._max_chunks

    def _insert(self, worker_id: WorkerId, path: Path) -> _Node:
        node, depth, count = self._root, 0, len(path)
        while depth < count:
            child = node.children.get(path[depth])
            if child is None:
                child = node.children[path[depth]] = _Node(path, depth, count, node)
            else:
                depth = _parting(path, child.path, depth, min(count, child.end))
                if depth < child.end:
                    child = self._split(child, depth)
            child.holders[worker_id] = child.holders.get(worker_id, 0) + 1
            node, depth = child, child.end
        node.ends += 1
        return node

    def _split(self, node: _Node, at: int) -> _Node:
        """A new node above for the part before `at`; `node` stays the end of its entries."""
        assert node.parent is not None
        upper = _Node(node.path, node.start, at, node.parent, {node.path[at]: node}, node.holders.copy())
        node.parent.children[node.path[node.start]] = upper
        node.start, node.parent = at, upper
        return upper

    def _remove(self, entry: _Entry | None) -> None:
        if entry is None or self._entries.get(entry.request_id) is not entry:
            return
        del self._entries[entry.request_id]
        self._chunks -= entry.node.end
        entry.node.ends -= 1
        node, worker_id, lowest_left = entry.node, entry.worker_id, entry.node
        while node.parent is not None:
            left = node.holders[worker_id] - 1
            if left:
                node.holders[worker_id] = left
            else:
                del node.holders[worker_id]
            if not node.holders:
                del node.parent.children[node.path[node.start]]
                lowest_left = node.parent
            node = node.parent
        self._fold(lowest_left)

    def _fold(self, node: _Node) -> None:
        """Join a node that neither forks nor ends anything with the one below it."""
        if node.parent is not None and node.ends == 0 and len(node.children) == 1:
            (child,) = node.children.values()
            child.start, child.parent = node.start, node.parent
            node.parent.children[child.path[child.start]] = child

    def _expire(self) -> None:
        if not self._lingering:
            return
        now = self._clock()
        while self._lingering and (self._lingering[0].expires_at or 0.0) <= now:
            entry = self._lingering.popleft()
            self._expired += self._entries.get(entry.request_id) is entry
            self._remove(entry)

    def _oldest(self) -> _Entry:
        """The next to end by itself, or else the one that was routed first."""
        while self._lingering:
            entry = self._lingering.popleft()
            if self._entries.get(entry.request_id) is entry:
                return entry
        return next(iter(self._entries.values()))


def _parting(a: Path, b: Path, low: int, high: int) -> int:
    """The first place before `high` where two prompts differ, else `high`. They are equal at `low` and before it."""
    if a[high - 1] == b[high - 1]:
        return high
    high -= 1
    while high - low > 1:
        middle = (low + high) // 2
        if a[middle] == b[middle]:
            low = middle
        else:
            high = middle
    return high
