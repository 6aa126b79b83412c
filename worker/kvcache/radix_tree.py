"""RadixTree: which token prefixes have their KV in the pool, shared by all sequences.

    namespace "" ── [A B C D | E F G H]  blocks 7 3          an edge is whole blocks (here 4 tokens each)
                        ├── [I J K L]    block 9             children differ in their first block
                        └── [M N O P | Q R S T]  blocks 4 5

Finding the longest cached prefix walks down and compares tokens, edge by edge. Inserting walks the same way; at
the first difference *inside* an edge the edge is split at that block:

    [A B C D | E F G H]   + A B C D X ..   =   [A B C D] ──┬── [E F G H]
                                                           └── [X ..]

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
from collections.abc import Iterator, Sequence

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.radix_node import RadixNode


class RadixTree:
    """Prefix cache over `pool`. `chunk_blocks` is the number of blocks of a chunk."""

    def __init__(self, pool: BlockPool, block_size: int, chunk_blocks: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._chunk_blocks = chunk_blocks
        self._roots: dict[str, RadixNode] = {}
        self._node_by_tail: dict[int, RadixNode] = {}
        self._chunk_by_block: dict[int, ChunkHash] = {}
        self._lru: list[tuple[int, int, RadixNode]] = []
        self._tick = 0
        self._events: list[CacheEvent] = []

    @property
    def present_chunks(self) -> set[ChunkHash]:
        return set(self._chunk_by_block.values())

    def match(self, namespace: str, tokens: Sequence[int], *, touch: bool = True) -> list[int]:
        """Block ids of the longest cached prefix, whole blocks only. The caller shares them before it uses them."""
        self._tick += touch
        blocks: list[int] = []
        node = self._roots.get(namespace)
        while node is not None:
            if touch:
                node.last_access = self._tick
            node = node.child_of(tokens, len(blocks) * self._block_size)
            if node is None:
                break
            common = node.common_blocks(tokens, len(blocks) * self._block_size)
            blocks += node.blocks[:common]
            if touch:
                node.last_access = self._tick
            if common < len(node.blocks):
                break
        return blocks

    def insert(
        self, namespace: str, tokens: Sequence[int], blocks: Sequence[int], chunk_hashes: Sequence[ChunkHash]
    ) -> list[int]:
        """Make `tokens` (len(blocks) whole blocks, all computed and in use) findable; return the ids that stay.

        Where the answer differs from `blocks`, the tree already had that block. `chunk_hashes` are those of `tokens`.
        """
        self._tick += 1
        node = self._roots.setdefault(namespace, RadixNode(self._block_size, namespace=namespace))
        node.last_access = self._tick
        kept: list[int] = []
        while len(kept) < len(blocks):
            child = node.child_of(tokens, len(kept) * self._block_size)
            if child is None:
                break
            common = min(child.common_blocks(tokens, len(kept) * self._block_size), len(blocks) - len(kept))
            kept += child.blocks[:common]
            child.last_access = self._tick
            node = child
            if common < len(child.blocks):
                if len(kept) < len(blocks):
                    node = self._split(child, common)
                break
        if len(kept) < len(blocks):
            self._extend(node, tokens, blocks, len(kept), chunk_hashes)
            kept += blocks[len(kept) :]
        return kept

    def on_idle(self, block_id: int) -> None:
        """A cached block lost its last holder: if it ends a leaf, the leaf becomes evictable."""
        node = self._node_by_tail.get(block_id)
        if node is not None:
            self._queue(node)

    def evict(self, count: int) -> int:
        """Free up to `count` idle blocks, least recently used leaves first; return how many were freed."""
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
        """Forget everything at once. Idle blocks become free, blocks in use stay with their holders."""
        for node in self.nodes():
            for block_id in node.blocks:
                self._pool.unmark_cached(block_id)
        self._roots.clear()
        self._node_by_tail.clear()
        self._chunk_by_block.clear()
        self._lru.clear()
        self._events = [CacheEvent(CacheEventKind.CLEARED)]

    def take_events(self) -> list[CacheEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def nodes(self) -> Iterator[RadixNode]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def check_invariants(self) -> None:
        """Walk everything; AssertionError names what is wrong."""
        seen: set[int] = set()
        for node in self.nodes():
            node.check(is_root=node.parent is None)
            refs = [self._pool.ref_count(b) for b in node.blocks]
            assert refs == sorted(refs, reverse=True), f"a block is held without its ancestors: {refs}"
            assert not seen & set(node.blocks), "a block is in two places of the tree"
            seen.update(node.blocks)
            if node.blocks:
                assert self._node_by_tail.get(node.blocks[-1]) is node, "the tail index lost a node"
                assert node.children or refs[-1] or node.queued, "an idle leaf is not queued for eviction"
        cached = {b for b in range(self._pool.num_blocks) if self._pool.is_cached(b)}
        assert cached == seen, f"cached flags differ from the tree: {sorted(cached ^ seen)[:5]}"
        assert set(self._chunk_by_block) <= seen, "a chunk outlived its last block"
        assert len(self._node_by_tail) == sum(1 for n in self.nodes() if n.blocks), "stale tails"

    def _queue(self, node: RadixNode) -> None:
        if not node.queued and not node.children and node.parent is not None:
            node.queued = True
            heapq.heappush(self._lru, (node.last_access, node.serial, node))

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        upper = node.split(at)
        self._node_by_tail[upper.blocks[-1]] = upper
        return upper

    def _extend(
        self, node: RadixNode, tokens: Sequence[int], blocks: Sequence[int], start: int, hashes: Sequence[ChunkHash]
    ) -> None:
        """Attach blocks[start:] below `node`: a leaf just grows, any other node gets a child."""
        new_tokens = tokens[start * self._block_size : len(blocks) * self._block_size]
        if node.parent is not None and not node.children:
            del self._node_by_tail[node.blocks[-1]]
            node.grow(new_tokens, blocks[start:])
        else:
            node = node.add_child(new_tokens, blocks[start:])
        node.last_access = self._tick
        self._node_by_tail[blocks[-1]] = node
        stored: list[ChunkHash] = []
        for index in range(start, len(blocks)):
            self._pool.mark_cached(blocks[index])
            if (index + 1) % self._chunk_blocks == 0:
                chunk = hashes[index // self._chunk_blocks]
                self._chunk_by_block[blocks[index]] = chunk
                stored.append(chunk)
        if stored:
            self._events.append(CacheEvent(CacheEventKind.STORED, tuple(stored)))

    def _cut_tail(self, node: RadixNode, limit: int) -> int:
        """Drop up to `limit` idle blocks from the end of a leaf; remove the node when nothing is left."""
        del self._node_by_tail[node.blocks[-1]]
        removed: list[ChunkHash] = []
        cut = 0
        while node.blocks and cut < limit and self._pool.ref_count(node.blocks[-1]) == 0:
            block_id = node.pop_block()
            self._pool.unmark_cached(block_id)
            cut += 1
            if block_id in self._chunk_by_block:
                removed.append(self._chunk_by_block.pop(block_id))
        if removed:
            self._events.append(CacheEvent(CacheEventKind.REMOVED, tuple(removed)))
        if node.blocks:
            self._node_by_tail[node.blocks[-1]] = node
            if self._pool.ref_count(node.blocks[-1]) == 0:
                self._queue(node)
        else:
            self._unlink(node)
        return cut

    def _unlink(self, node: RadixNode) -> None:
        parent = node.detach()
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[parent.namespace]
        elif self._pool.ref_count(parent.blocks[-1]) == 0:
            self._queue(parent)
