"""ChunkHashCache: the chunk table, a dictionary from chunk hash to the blocks of that chunk.

    tokens   [A B C D E F G H | I J K L M N O P | Q R ..     a chunk is whole blocks (here 2 of 4 tokens)
    hashes    h0 -----------> | h1 -----------> | h2         a hash covers its chunk and all before it

    table     h0: blocks 7 3, end 8      h1: blocks 9 4, end 16, parent h0      h2: absent, so 16 tokens are a hit

Finding the longest cached prefix hashes the prompt chunk by chunk and looks each hash up. A hash only finds the
entry; it counts when its tokens are the prompt's and its parent is the entry found before it. So two prompts with
one hash cost the later one its place in the table, never a right answer.

Compared with the radix tree there is less to do and less to find: a hit is whole chunks, the blocks behind the last
whole chunk are lost when their sequence ends, and prompts that differ inside a chunk keep that chunk twice.

Eviction takes whole chunks in the order of the pool's idle list, looking at last blocks only. Tables let go of their
blocks from the end, so the list has later chunks before earlier ones. Of an evicted chunk, blocks that somebody still
holds (a fork that left inside the chunk) stay with their holders and are no longer findable.

Owns: the table, the order of eviction among chunks, and the cache events.
Does not: find parts of chunks, hold references (block tables do, in BlockPool) or define the hash.
Invariants: every ancestor of an entry is an entry; a block is cached exactly while an entry has it; a block ends at
most one chunk; a chunk is in `present_chunks` exactly while it has an entry.
Source: hashed blocks as in vLLM's automatic prefix caching, by chunk, with exact comparison added.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash, hash_chunk
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.prefix_cache import CacheNamespace, PrefixHit
from worker.kvcache.radix_node import pack

_AUDIT_PIECE = 128  # chunks


@dataclass(slots=True, eq=False)
class _Chunk:
    """One entry. `end` is the position behind the chunk's last token, counted from the start of the sequence."""

    namespace: CacheNamespace
    key: ChunkHash
    parent: _Chunk | None
    packed: bytes
    blocks: array[int]
    end: int
    num_children: int = 0

    def continues(self, parent: _Chunk | None, packed: bytes) -> bool:
        return self.parent is parent and self.packed == packed


@dataclass(slots=True, eq=False)
class _Table:
    root: ChunkHash
    chunks: dict[ChunkHash, _Chunk] = field(default_factory=dict)


class ChunkHashCache:
    """A PrefixCache of whole chunks. `root_of` gives the hash before the first chunk of a namespace."""

    def __init__(
        self, pool: BlockPool, block_size: int, chunk_blocks: int, root_of: Callable[[CacheNamespace], ChunkHash]
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._chunk_blocks = chunk_blocks
        self._chunk_tokens = chunk_blocks * block_size
        self._root_of = root_of
        self._tables: dict[CacheNamespace, _Table] = {}
        self._chunk_by_last: dict[int, _Chunk] = {}
        self._entries_of = array("i", bytes(4 * pool.num_blocks))  # above 1 where a fork left inside a chunk
        self._events: list[CacheEvent] = []
        self.changes = 0

    @property
    def hit_unit(self) -> int:
        return self._chunk_tokens

    @property
    def present_chunks(self) -> set[ChunkHash]:
        return {chunk.key for chunk in self._chunks()}

    def match(self, namespace: CacheNamespace, tokens: Sequence[int], *, touch: bool = True) -> PrefixHit:
        """`touch` changes nothing here: a chunk is recent because it was held, not because it was looked at."""
        blocks: list[int] = []
        table = self._tables.get(namespace)
        if table is None:
            return PrefixHit(blocks)
        key, parent = table.root, None
        for start in range(0, len(tokens) - self._chunk_tokens + 1, self._chunk_tokens):
            piece = tokens[start : start + self._chunk_tokens]
            key = hash_chunk(key, piece)
            chunk = table.chunks.get(key)
            if chunk is None or not chunk.continues(parent, pack(piece)):
                break
            blocks += chunk.blocks
            parent = chunk
        return PrefixHit(blocks)

    def insert(
        self,
        namespace: CacheNamespace,
        tokens: Sequence[int],
        blocks: Sequence[int],
        chunk_hashes: Sequence[ChunkHash],
    ) -> list[int]:
        size = self._chunk_tokens
        hashes = chunk_hashes[: len(blocks) // self._chunk_blocks]
        parent = self._last_entered(namespace, blocks, hashes)
        done = parent.end // size if parent is not None else 0
        kept = list(blocks[: done * self._chunk_blocks])
        stored: list[ChunkHash] = []
        for index in range(done, len(hashes)):
            packed = pack(tokens[index * size : (index + 1) * size])
            chunk = self._find(namespace, hashes[index])
            if chunk is None:
                own = array("i", blocks[len(kept) : len(kept) + self._chunk_blocks])
                chunk = _Chunk(namespace, hashes[index], parent, packed, own, (index + 1) * size)
                self._add(chunk)
                stored.append(chunk.key)
            elif not chunk.continues(parent, packed):
                break  # another chunk with this hash came first
            kept += chunk.blocks
            parent = chunk
        if stored:
            self._events.append(CacheEvent(CacheEventKind.STORED, tuple(stored)))
        return kept + list(blocks[len(kept) :])

    def insert_tail(self, namespace: CacheNamespace, tokens: Sequence[int], block_id: int) -> None:
        """Only whole chunks are found here."""

    def claimed_slots(self, block_id: int) -> int:
        return self._block_size if self._pool.is_cached(block_id) else 0

    def on_idle(self, block_ids: Sequence[int]) -> None:
        """Nothing to do: the pool's idle list is the order of eviction."""

    def evict(self, count: int) -> int:
        """Whole chunks, longest idle first, until `count` blocks are free: up to a chunk less one more than asked."""
        before = self._pool.num_free
        removed: list[ChunkHash] = []
        while self._pool.num_free - before < count and (chunk := self._longest_idle()) is not None:
            self._remove(chunk)
            removed.append(chunk.key)
        if removed:
            self._events.append(CacheEvent(CacheEventKind.REMOVED, tuple(removed)))
        return self._pool.num_free - before

    def clear(self) -> None:
        for chunk in self._chunks():
            self._let_go(chunk)
        self._tables.clear()
        self._chunk_by_last.clear()
        self._events = [CacheEvent(CacheEventKind.CLEARED)]
        self.changes += 1

    def take_events(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events

    def check_invariants(self) -> None:
        for _ in self.audit():
            pass

    def audit(self) -> Iterator[None]:
        assert all(table.chunks for table in self._tables.values()), "an empty table"
        chunks = list(self._chunks())
        children = Counter(id(chunk.parent) for chunk in chunks if chunk.parent is not None)
        entries: Counter[int] = Counter()
        for number, chunk in enumerate(chunks, start=1):
            self._check_chunk(chunk, children[id(chunk)])
            entries.update(chunk.blocks)
            if number % _AUDIT_PIECE == 0:
                yield
        assert len(self._chunk_by_last) == len(chunks), "stale last blocks"
        for block_id in range(self._pool.num_blocks):
            assert self._entries_of[block_id] == entries[block_id], f"block {block_id} is miscounted"
            assert self._pool.is_cached(block_id) == (entries[block_id] > 0), f"cached flag of {block_id} is wrong"
            if block_id % (4 * _AUDIT_PIECE) == 0:
                yield

    def _check_chunk(self, chunk: _Chunk, num_children: int) -> None:
        parent_end = 0 if chunk.parent is None else chunk.parent.end
        assert chunk.end == parent_end + self._chunk_tokens, "a chunk is not where its parent ends"
        assert len(chunk.packed) == 4 * self._chunk_tokens and len(chunk.blocks) == self._chunk_blocks
        assert self._find(chunk.namespace, chunk.key) is chunk, "an entry under the wrong hash"
        assert chunk.parent is None or self._find(chunk.namespace, chunk.parent.key) is chunk.parent, "an orphan"
        assert chunk.num_children == num_children, "miscounted children"
        assert self._chunk_by_last.get(chunk.blocks[-1]) is chunk, "a block ends two chunks, or none"

    def _chunks(self) -> Iterator[_Chunk]:
        for table in self._tables.values():
            yield from table.chunks.values()

    def _find(self, namespace: CacheNamespace, key: ChunkHash) -> _Chunk | None:
        table = self._tables.get(namespace)
        return None if table is None else table.chunks.get(key)

    def _last_entered(
        self, namespace: CacheNamespace, blocks: Sequence[int], hashes: Sequence[ChunkHash]
    ) -> _Chunk | None:
        """The furthest entry that has the very blocks of the caller, from which the walk may go on.

        A held block's content does not change, so the same block means the same tokens from the start.
        """
        for index in range(len(hashes) - 1, -1, -1):
            chunk = self._chunk_by_last.get(blocks[(index + 1) * self._chunk_blocks - 1])
            if chunk is not None and chunk.end == (index + 1) * self._chunk_tokens and chunk.namespace == namespace:
                return chunk
        return None

    def _add(self, chunk: _Chunk) -> None:
        table = self._tables.get(chunk.namespace)
        if table is None:
            table = self._tables[chunk.namespace] = _Table(self._root_of(chunk.namespace))
        table.chunks[chunk.key] = chunk
        self._chunk_by_last[chunk.blocks[-1]] = chunk
        self.changes += 1
        if chunk.parent is not None:
            chunk.parent.num_children += 1
        self._pool.mark_cached([block_id for block_id in chunk.blocks if self._entries_of[block_id] == 0])
        for block_id in chunk.blocks:
            self._entries_of[block_id] += 1

    def _remove(self, chunk: _Chunk) -> None:
        table = self._tables[chunk.namespace]
        del table.chunks[chunk.key]
        if not table.chunks:
            del self._tables[chunk.namespace]
        del self._chunk_by_last[chunk.blocks[-1]]
        self.changes += 1
        if chunk.parent is not None:
            chunk.parent.num_children -= 1
        self._let_go(chunk)

    def _let_go(self, chunk: _Chunk) -> None:
        for block_id in chunk.blocks:
            self._entries_of[block_id] -= 1
        self._pool.unmark_cached([block_id for block_id in chunk.blocks if self._entries_of[block_id] == 0])

    def _longest_idle(self) -> _Chunk | None:
        """The chunk without children whose last block has been idle longest. Almost always the list's first block."""
        for block_id in self._pool.idle_blocks():
            chunk = self._chunk_by_last.get(block_id)
            if chunk is not None and chunk.num_children == 0:
                return chunk
        return None
