"""RadixTree: which token prefixes have their KV in the pool, shared by all sequences.

    namespace    ── [A B C D | E F G H]  blocks 7 3          an edge is whole blocks (here 4 tokens each)
                        ├── [I J K L]    block 9             children differ in their first block
                        ├── [M N O P | Q R S T]  blocks 4 5
                        └── [I J X]      block 6             a tail: what some sequence had behind its last whole block

Finding the longest cached prefix walks down and compares tokens, edge by edge. Inserting walks the same way; at
the first difference *inside* an edge the edge is split at that block:

    [A B C D | E F G H]   + A B C D X ..   =   [A B C D] ──┬── [E F G H]
                                                           └── [X ..]

Where the walk ends, the next block in the tree often begins like the rest of the prompt: its first slots are a
partial hit, to be copied. Tails make that exact to the token also for what ended in the middle of a block.

Blocks that the inserter computed although the tree already had them are duplicates: `insert` answers with the
block ids that stay, and the caller moves its table to them before it releases its own.

Eviction takes the least recently used leaf and cuts its edge from the tail. Because a sequence that holds a block
also holds everything before it, an idle block never has a busy one below, so all idle blocks can be evicted.

Owns: nodes, the LRU order of leaves, the chunk hash of every block that ends a chunk, and the cache events.
Does not: hold references (block tables do, in BlockPool) or compute hashes.
Invariants: every ancestor of a cached block is cached; no block is in two places; every idle leaf is queued for
eviction; a chunk is in `present_chunks` exactly while its last block is in the tree.
Source: radix tree with LRU leaf eviction as in SGLang's RadixAttention (arXiv 2312.07104), with whole-block edges.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.prefix_cache import CacheNamespace, PrefixHit
from worker.kvcache.radix_node import TOKEN_BYTES, RadixNode, common_tokens, pack

_AUDIT_PIECE = 512  # blocks and children


class RadixTree:
    """The default PrefixCache. `chunk_blocks` is the number of blocks of a chunk; `partial` finds parts of blocks."""

    def __init__(self, pool: BlockPool, block_size: int, chunk_blocks: int, *, partial: bool = True) -> None:
        self._pool = pool
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._chunk_blocks = chunk_blocks
        self._partial = partial
        self._roots: dict[CacheNamespace, RadixNode] = {}
        self._namespaces: dict[int, CacheNamespace] = {}  # of the roots, by serial
        self._node_by_tail: dict[int, RadixNode] = {}
        self._chunk_by_block: dict[int, ChunkHash] = {}
        self._lru: list[tuple[int, int, RadixNode]] = []
        self._tick = 0
        self._serials = itertools.count()
        self._events: list[CacheEvent] = []
        self.changes = 0

    @property
    def hit_unit(self) -> int:
        return 1 if self._partial else self._block_size

    @property
    def present_chunks(self) -> set[ChunkHash]:
        return set(self._chunk_by_block.values())

    def match(self, namespace: CacheNamespace, tokens: Sequence[int], *, touch: bool = True) -> PrefixHit:
        root = self._roots.get(namespace)
        if root is None:
            return PrefixHit([])
        self._tick += touch
        packed = pack(tokens)
        blocks: list[int] = []
        node, common = root, 0
        for node, common in self._walk(root, packed):
            blocks.extend(node.blocks[:common])
            if touch:
                node.last_access = self._tick
        if touch:
            root.last_access = self._tick
        if not self._partial:
            return PrefixHit(blocks)
        return self._with_partial(node, common, packed[len(blocks) * self._block_bytes :], blocks, touch)

    def insert(
        self,
        namespace: CacheNamespace,
        tokens: Sequence[int],
        blocks: Sequence[int],
        chunk_hashes: Sequence[ChunkHash],
    ) -> list[int]:
        node, held = self._last_entered(namespace, blocks)
        packed = pack(tokens[held * self._block_size : len(blocks) * self._block_size])
        node, common, found = self._reach(node, packed)
        kept = [*blocks[:held], *found]
        if len(kept) < len(blocks):
            if common < len(node.blocks):
                node = self._split(node, common)
            self._extend(node, packed[len(found) * self._block_bytes :], blocks, len(kept), chunk_hashes)
            kept += blocks[len(kept) :]
        return kept

    def insert_tail(self, namespace: CacheNamespace, tokens: Sequence[int], block_id: int) -> None:
        packed = pack(tokens)
        whole = len(packed) // self._block_bytes
        tail = packed[whole * self._block_bytes :]
        if not self._partial or not tail:
            return
        if whole and namespace not in self._roots:
            return
        node, common, kept = self._reach(self._root_of(namespace), packed[: whole * self._block_bytes])
        if len(kept) < whole or self._continues_with(node, common, tail):
            return  # its ancestors left the tree, or the same tokens are there already
        if common < len(node.blocks):
            node = self._split(node, common)
        shorter = node.tail_before(tail)
        if self._pool.is_cached(block_id) and (shorter is None or shorter.blocks[0] != block_id):
            return  # in the tree in another place: a fork that has not written yet
        self._drop_tail_before(node, tail)
        child = RadixNode(self._block_bytes, next(self._serials), tail, [block_id])
        child.last_access = self._tick
        node.add_child(child)
        self.changes += 1
        self._node_by_tail[block_id] = child
        self._pool.mark_cached([block_id])

    def claimed_slots(self, block_id: int) -> int:
        if not self._pool.is_cached(block_id):
            return 0
        node = self._node_by_tail.get(block_id)
        return len(node.packed) // TOKEN_BYTES if node is not None and node.is_tail else self._block_size

    def on_idle(self, block_ids: Sequence[int]) -> None:
        """If a block ends a leaf, the leaf becomes evictable."""
        for block_id in block_ids:
            node = self._node_by_tail.get(block_id)
            if node is not None:
                self._queue(node)

    def evict(self, count: int) -> int:
        """Least recently used leaves first."""
        freed = 0
        while freed < count and self._lru:
            access, _, node = heapq.heappop(self._lru)
            node.queued = False
            if node.children or not node.blocks or self._pool.ref_count(node.blocks[-1]):
                continue  # queued again when it becomes an idle leaf
            if access != node.last_access:
                self._queue(node)
                continue
            freed += self._cut_tail(node, count - freed)
        return freed

    def clear(self) -> None:
        for node in self.nodes():
            self._pool.unmark_cached(node.blocks)
        self._roots.clear()
        self._namespaces.clear()
        self._node_by_tail.clear()
        self._chunk_by_block.clear()
        self._lru.clear()
        self._events = [CacheEvent(CacheEventKind.CLEARED)]
        self.changes += 1

    def take_events(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events

    def nodes(self) -> Iterator[RadixNode]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def check_invariants(self) -> None:
        for _ in self.audit():
            pass

    def audit(self) -> Iterator[None]:
        """`check_invariants` in pieces. Nothing may change until it ends."""
        seen: set[int] = set()
        num_nodes = looked_at = 0
        for node in self.nodes():
            self._check_node(node)
            assert seen.isdisjoint(node.blocks), "a block is in two places of the tree"
            seen.update(node.blocks)
            num_nodes += bool(node.blocks)
            looked_at += len(node.blocks) + len(node.children) + 1
            if looked_at >= _AUDIT_PIECE:
                looked_at = 0
                yield
        for start in range(0, self._pool.num_blocks, _AUDIT_PIECE):
            piece = range(start, min(start + _AUDIT_PIECE, self._pool.num_blocks))
            wrong = [b for b in piece if self._pool.is_cached(b) != (b in seen)]
            assert not wrong, f"cached flags differ from the tree: {wrong[:5]}"
            if piece.stop < self._pool.num_blocks:
                yield
        assert self._chunk_by_block.keys() <= seen, "a chunk outlived its last block"
        assert len(self._node_by_tail) == num_nodes, "stale tails"

    def _check_node(self, node: RadixNode) -> None:
        node.check(is_root=node.parent is None)
        refs = [self._pool.ref_count(b) for b in node.blocks]
        assert refs == sorted(refs, reverse=True), f"a block is held without its ancestors: {refs}"
        if node.blocks:
            assert self._node_by_tail.get(node.blocks[-1]) is node, "the tail index lost a node"
            assert node.children or refs[-1] or node.queued, "an idle leaf is not queued for eviction"
        else:
            assert node.children, "an empty root"

    def _walk(self, root: RadixNode, packed: bytes) -> Iterator[tuple[RadixNode, int]]:
        """Nodes along `packed`, each with the number of its blocks that match; only the last may match in part."""
        node, at = root, 0
        while (child := node.child_of(packed, at)) is not None:
            common = child.common_blocks(packed, at)
            at += common * self._block_bytes
            yield child, common
            if common < len(child.blocks):
                return
            node = child

    def _with_partial(self, node: RadixNode, common: int, rest: bytes, blocks: list[int], touch: bool) -> PrefixHit:
        """The hit, with the block after the last matching one when it begins like `rest`."""
        if common < len(node.blocks):
            start = common * self._block_bytes
            tokens = common_tokens(bytes(node.packed[start : start + self._block_bytes]), rest)
            return PrefixHit(blocks, node.blocks[common], tokens) if tokens else PrefixHit(blocks)
        closest = node.closest_child(rest) if rest else None
        if closest is None:
            return PrefixHit(blocks)
        child, tokens = closest
        if touch:
            child.last_access = self._tick
        return PrefixHit(blocks, child.blocks[0], tokens)

    def _root_of(self, namespace: CacheNamespace) -> RadixNode:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = RadixNode(self._block_bytes, next(self._serials))
            self._namespaces[root.serial] = namespace
        return root

    def _last_entered(self, namespace: CacheNamespace, blocks: Sequence[int]) -> tuple[RadixNode, int]:
        """Where to begin an insert: the furthest edge that ends with a block of the caller, and that block's number.

        What is written in a held block does not change, so the same block means the same tokens from the start. A
        decoding sequence begins right before its new block, instead of comparing all that it has entered before.
        """
        for held in range(len(blocks), 0, -1):
            node = self._node_by_tail.get(blocks[held - 1])
            if node is not None and not node.is_tail:
                return node, held
        return self._root_of(namespace), 0

    def _reach(self, start: RadixNode, packed: bytes) -> tuple[RadixNode, int, list[int]]:
        """Where `packed`, from the end of `start` on, leaves the tree.

        The node there, how many of its blocks match, and all blocks between `start` and there.
        """
        self._tick += 1
        above: RadixNode | None = start
        while above is not None:
            above.last_access = self._tick
            above = above.parent
        node, common = start, len(start.blocks)
        found: list[int] = []
        for node, common in self._walk(start, packed):
            node.last_access = self._tick
            found.extend(node.blocks[:common])
        return node, common, found

    def _continues_with(self, node: RadixNode, common: int, tail: bytes) -> bool:
        """Whether some block behind this place begins with `tail`."""
        if common == len(node.blocks):
            return node.has_child_beginning_with(tail)
        start = common * self._block_bytes
        return node.packed[start : start + len(tail)] == tail

    def _queue(self, node: RadixNode) -> None:
        if not node.queued and not node.children and node.parent is not None:
            node.queued = True
            heapq.heappush(self._lru, (node.last_access, node.serial, node))

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        upper = node.split(at, next(self._serials))
        self._node_by_tail[upper.blocks[-1]] = upper
        return upper

    def _extend(
        self, node: RadixNode, packed: bytes, blocks: Sequence[int], start: int, hashes: Sequence[ChunkHash]
    ) -> None:
        """Attach blocks[start:], with tokens `packed`, below `node`: a leaf just grows, any other node gets a child."""
        if self._partial:
            self._drop_tail_before(node, packed[: self._block_bytes])
        if node.parent is not None and not node.children:
            del self._node_by_tail[node.blocks[-1]]
            node.grow(packed, blocks[start:])
        else:
            node = node.add_child(RadixNode(self._block_bytes, next(self._serials), packed, blocks[start:]))
        node.last_access = self._tick
        self._node_by_tail[blocks[-1]] = node
        self._pool.mark_cached(blocks[start:])
        self.changes += 1
        per_chunk = self._chunk_blocks
        first, end = start // per_chunk, len(blocks) // per_chunk
        if first < end:
            stored = tuple(hashes[first:end])
            self._chunk_by_block.update(zip(blocks[(first + 1) * per_chunk - 1 :: per_chunk], stored, strict=True))
            self._events.append(CacheEvent(CacheEventKind.STORED, stored))

    def _drop_tail_before(self, node: RadixNode, key: bytes) -> None:
        """A tail whose tokens `key` continues says nothing any more once `key` is there."""
        tail = node.tail_before(key)
        if tail is not None:
            tail.detach(tail.key)
            gone = tail.pop_blocks(1)
            del self._node_by_tail[gone[0]]
            self._pool.unmark_cached(gone)

    def _cut_tail(self, node: RadixNode, limit: int) -> int:
        """Drop up to `limit` idle blocks from the end of a leaf; remove the node when nothing is left."""
        key = node.key
        del self._node_by_tail[node.blocks[-1]]
        cut = node.pop_blocks(self._idle_at_end(node.blocks, limit))
        self._pool.unmark_cached(cut)
        self.changes += 1
        chunks = self._chunk_by_block
        removed = [chunks.pop(block_id) for block_id in cut if block_id in chunks]
        if removed:
            self._events.append(CacheEvent(CacheEventKind.REMOVED, tuple(removed)))
        if node.blocks:
            self._node_by_tail[node.blocks[-1]] = node
            if self._pool.ref_count(node.blocks[-1]) == 0:
                self._queue(node)
        else:
            self._unlink(node, key)
        return len(cut)

    def _idle_at_end(self, blocks: Sequence[int], limit: int) -> int:
        """How many of the last `limit` blocks of a leaf nobody holds: who holds one holds all before it."""
        count = 0
        for block_id in reversed(blocks[-limit:]):
            if self._pool.ref_count(block_id):
                break
            count += 1
        return count

    def _unlink(self, node: RadixNode, key: bytes) -> None:
        parent = node.detach(key)
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[self._namespaces.pop(parent.serial)]
        elif self._pool.ref_count(parent.blocks[-1]) == 0:
            self._queue(parent)
