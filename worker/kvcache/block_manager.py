"""BlockManager: the scheduler's only view of KV memory.

A sequence's tokens, and who owns the KV of each range:

    [0, cached)           found in the cache at `allocate`: whole blocks shared, the part of a block behind them copied
    [cached, committed)   computed by this sequence, whole blocks, in the cache since `commit`
    [committed, computed) computed, in a block of this sequence, or shared with its forks
    [computed, reserved)  slots reserved, nothing written yet

Copy-on-write: a block that somebody else holds, or whose slots the cache still offers, is never written. Before the
next write `append_token` takes a new block for it and notes the copy; the step carries the copies out first.

Owns: the block table of every live sequence; admission arithmetic; evicting when blocks run short; pins.
Does not: touch tensors or decide which sequence waits or is preempted (scheduler).
Invariants: a refused `allocate` or `append_token` changes no ref count; hit blocks are locked before capacity is
judged, so a request never evicts its own prefix; a freed sequence leaves nothing behind but cached blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.core.events import CacheEvent
from cluster.core.hashing import ChunkHash, RouteScheme, hash_chunk, root_hash
from worker.kvcache.block_pool import BlockCounts, BlockPool
from worker.kvcache.prefix_cache import CacheNamespace, PrefixCache, PrefixHit

BlockCopy = tuple[int, int]  # source, target


@dataclass(slots=True, eq=False)
class _Table:
    namespace: CacheNamespace
    root: ChunkHash
    blocks: list[int]
    num_computed: int
    committed_blocks: int
    chunk_hashes: list[ChunkHash] = field(default_factory=list)
    tokens: Sequence[int] = ()  # as last committed: at least `num_computed` of them


@dataclass(slots=True, eq=False)
class _Pin:
    blocks: list[int]
    until_s: float


class BlockManager:
    """KV bookkeeping of one replica. `cache` None switches prefix caching off."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache | None,
        block_size: int,
        scheme: RouteScheme,
        kv_fingerprint: str = "",
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._block_size = block_size
        self._scheme = scheme
        self._kv_fingerprint = kv_fingerprint
        self._tables: dict[str, _Table] = {}
        self._pins: dict[str, _Pin] = {}
        self._copies: list[BlockCopy] = []

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def caches_prefixes(self) -> bool:
        return self._cache is not None

    @property
    def capacity_tokens(self) -> int:
        return self._pool.num_blocks * self._block_size

    @property
    def num_sequences(self) -> int:
        return len(self._tables)

    def counts(self) -> BlockCounts:
        return self._pool.counts()

    def cached_prefix(self, tokens: Sequence[int], salt: str = "") -> int:
        """Tokens of the prompt that a prefill could skip right now; looks without touching the LRU order."""
        hit = self._match(tokens, salt, touch=False)
        return len(hit.blocks) * self._block_size + hit.tail_tokens

    def allocate(self, seq_id: str, tokens: Sequence[int], salt: str = "", *, spare_blocks: int = 0) -> int | None:
        """Reserve slots for all of `tokens`, sharing what the cache holds.

        Returns the number of cached tokens (less than len(tokens): at least one token is always computed, because
        its logits are needed), or None, without side effects, when memory is short. `spare_blocks`: refuse unless so
        many blocks could still be taken afterwards.
        """
        assert seq_id not in self._tables, f"sequence {seq_id} is already allocated"
        hit = self._match(tokens, salt, touch=True)
        wanted = self._blocks_for(len(tokens)) - len(hit.blocks)
        locked = hit.blocks if hit.tail_block is None else [*hit.blocks, hit.tail_block]
        for block_id in locked:
            self._pool.share(block_id)
        fresh = self._take(wanted, spare_blocks)
        if fresh is None and hit.tail_block is not None:  # locking the tail may be what made memory short
            self._release([hit.tail_block])
            hit = PrefixHit(hit.blocks)
            fresh = self._take(wanted, spare_blocks)
        if fresh is None:
            self._release(hit.blocks)
            return None
        if hit.tail_block is not None:
            self._copies.append((hit.tail_block, fresh[0]))
            self._release([hit.tail_block])
        cached = len(hit.blocks) * self._block_size + hit.tail_tokens
        root = root_hash(self._scheme.with_salt(salt))
        self._tables[seq_id] = _Table(self._namespace(salt), root, hit.blocks + fresh, cached, len(hit.blocks))
        return cached

    def append_token(self, seq_id: str, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all, and make the slots behind the computed ones writable.

        False, without side effects, when no block can be had.
        """
        table = self._tables[seq_id]
        index = table.num_computed // self._block_size
        split = index < len(table.blocks) and not self._writable(table.blocks[index], table.num_computed)
        fresh = self._take(self._blocks_for(num_tokens) - len(table.blocks) + split)
        if fresh is None:
            return False
        if split:
            shared, own = table.blocks[index], fresh.pop()
            self._copies.append((shared, own))
            table.blocks[index] = own
            self._release([shared])
        table.blocks += fresh
        return True

    def fork(self, parent_id: str, child_id: str, num_tokens: int | None = None) -> None:
        """A new sequence that shares the parent's first `num_tokens` computed tokens (default: all of them)."""
        assert child_id not in self._tables, f"sequence {child_id} is already allocated"
        parent = self._tables[parent_id]
        count = parent.num_computed if num_tokens is None else num_tokens
        assert 0 < count <= parent.num_computed, f"{count} of {parent.num_computed} computed tokens cannot be forked"
        blocks = parent.blocks[: self._blocks_for(count)]
        for block_id in blocks:
            self._pool.share(block_id)
        self._tables[child_id] = _Table(
            namespace=parent.namespace,
            root=parent.root,
            blocks=blocks,
            num_computed=count,
            committed_blocks=min(parent.committed_blocks, count // self._block_size),
            chunk_hashes=parent.chunk_hashes[: count // self._scheme.chunk_tokens],
            tokens=parent.tokens[:count],
        )

    def get_block_ids(self, seq_id: str) -> list[int]:
        """The block table, in position order. Callers must not change it."""
        return self._tables[seq_id].blocks

    def commit(self, seq_id: str, tokens: Sequence[int], num_computed: int, *, tail: bool = False) -> None:
        """KV of tokens[:num_computed] is written: whole blocks enter the cache, duplicates are folded.

        `tail`: what is behind the last whole block becomes findable too (the prompt is complete).
        """
        table = self._tables[seq_id]
        table.num_computed, table.tokens = num_computed, tokens
        if self._cache is None:
            return
        full = num_computed // self._block_size
        if full > table.committed_blocks:
            self._insert(self._cache, table, tokens, full)
        if tail:
            self._insert_tail(self._cache, table)

    def free(self, seq_id: str) -> None:
        """Let go of the sequence's blocks, tail first. Unknown ids are ignored, so freeing twice is harmless."""
        table = self._tables.pop(seq_id, None)
        if table is not None:
            if self._cache is not None:
                self._insert_tail(self._cache, table)
            self._release(table.blocks)

    def pin(self, name: str, tokens: Sequence[int], salt: str = "", *, until_s: float) -> int:
        """Keep the cached whole blocks of `tokens` from eviction until that time; returns how many tokens that is.

        Pinning a name again replaces its pin. A pin never makes a request wait: `drop_pins` comes first.
        """
        hit = PrefixHit([]) if self._cache is None else self._cache.match(self._namespace(salt), tokens)
        for block_id in hit.blocks:
            self._pool.share(block_id)
        self.unpin(name)
        if hit.blocks:
            self._pins[name] = _Pin(hit.blocks, until_s)
        return len(hit.blocks) * self._block_size

    def unpin(self, name: str) -> bool:
        """False when there was no such pin (any more)."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._release(pin.blocks)
        return pin is not None

    def expire_pins(self, now_s: float) -> None:
        for name in [name for name, pin in self._pins.items() if pin.until_s <= now_s]:
            self.unpin(name)

    def drop_pins(self) -> bool:
        """Give up all pins because a request needs the memory. False when there were none."""
        names = list(self._pins)
        for name in names:
            self.unpin(name)
        return bool(names)

    def reset_cache(self) -> None:
        """Drop all cached prefixes and pins; running sequences keep their blocks."""
        self.drop_pins()
        if self._cache is None:
            return
        self._cache.clear()
        for table in self._tables.values():
            table.committed_blocks = 0

    def take_copies(self) -> list[BlockCopy]:
        """Block copies to carry out, in this order, before the next write."""
        copies, self._copies = self._copies, []
        return copies

    def take_events(self) -> list[CacheEvent]:
        return [] if self._cache is None else self._cache.take_events()

    def check_invariants(self) -> None:
        held = [b for table in self._tables.values() for b in table.blocks]
        held += [b for pin in self._pins.values() for b in pin.blocks]
        self._pool.check_invariants(held)
        if self._cache is not None:
            self._cache.check_invariants()

    def check_writable(self, seq_id: str, start: int, end: int) -> None:
        """AssertionError when a block that positions [start, end) fall into may not be written by this sequence."""
        blocks = self._tables[seq_id].blocks
        for index in range(start // self._block_size, self._blocks_for(end)):
            position = max(start, index * self._block_size)
            block_id = blocks[index]
            assert self._writable(block_id, position), (
                f"sequence {seq_id} writes position {position} into block {block_id}, which has "
                f"{self._pool.ref_count(block_id)} holders"
            )

    def _writable(self, block_id: int, position: int) -> bool:
        """The slots from `position` on belong to one sequence alone and the cache offers none of them."""
        if self._pool.ref_count(block_id) != 1:
            return False
        return self._cache is None or self._cache.claimed_slots(block_id) <= position % self._block_size

    def _namespace(self, salt: str) -> CacheNamespace:
        return CacheNamespace(self._kv_fingerprint, self._scheme.adapter, salt)

    def _match(self, tokens: Sequence[int], salt: str, *, touch: bool) -> PrefixHit:
        if self._cache is None:
            return PrefixHit([])
        return self._cache.match(self._namespace(salt), tokens[: len(tokens) - 1], touch=touch)

    def _insert(self, cache: PrefixCache, table: _Table, tokens: Sequence[int], full: int) -> None:
        self._hash_chunks(table, tokens, full)
        kept = cache.insert(table.namespace, tokens[: full * self._block_size], table.blocks[:full], table.chunk_hashes)
        for index in range(table.committed_blocks, full):
            own, stays = table.blocks[index], kept[index]
            if own != stays:
                self._pool.share(stays)
                table.blocks[index] = stays  # the live table moves before its own copy can be reused
                self._release([own])
        table.committed_blocks = full

    def _insert_tail(self, cache: PrefixCache, table: _Table) -> None:
        full, behind = divmod(table.num_computed, self._block_size)
        if behind and table.committed_blocks == full and len(table.tokens) >= table.num_computed:
            cache.insert_tail(table.namespace, table.tokens[: table.num_computed], table.blocks[full])

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _take(self, count: int, spare: int = 0) -> list[int] | None:
        count = max(count, 0)
        if count + spare > self._pool.num_free + self._pool.num_evictable:
            return None
        missing = count - self._pool.num_free
        if missing > 0 and self._cache is not None:
            self._cache.evict(missing)
        return self._pool.allocate(count)

    def _release(self, blocks: Sequence[int]) -> None:
        for block_id in reversed(blocks):
            idle = self._pool.release(block_id)
            if idle and self._cache is not None and self._pool.is_cached(block_id):
                self._cache.on_idle(block_id)

    def _hash_chunks(self, table: _Table, tokens: Sequence[int], full_blocks: int) -> None:
        size = self._scheme.chunk_tokens
        chunks = full_blocks * self._block_size // size
        for index in range(len(table.chunk_hashes), chunks):
            parent = table.chunk_hashes[-1] if table.chunk_hashes else table.root
            table.chunk_hashes.append(hash_chunk(parent, tokens[index * size : (index + 1) * size]))
