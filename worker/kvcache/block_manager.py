"""BlockManager: the scheduler's only view of KV memory.

A sequence's tokens, and who owns the KV of each range:

    [0, cached)           found in the cache at `allocate`: whole blocks shared, the part of a block behind them copied
    [cached, committed)   computed by this sequence, whole blocks, in the cache since `commit`
    [committed, computed) computed, in a block of this sequence, or shared with its forks
    [computed, reserved)  slots reserved, nothing written yet

Copy-on-write: a block that somebody else holds, or whose slots the cache still offers, is never written. Before the
next write `append_token` takes a new block for it and notes the copy; the step carries the copies out first.

Owns: the block table of every live sequence; admission arithmetic; copy-on-write; pins; the checks of all this.
Does not: change ref counts or evict by itself (block_ledger), touch tensors, or decide which sequence waits or is
preempted (scheduler).
Invariants: a refused `allocate` or `append_token` changes no ref count; hit blocks are locked before capacity is
judged, so a request never evicts its own prefix; a freed sequence leaves nothing behind but cached blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.core.events import CacheEvent
from cluster.core.hashing import ChunkHash, RouteScheme, root_hash
from worker.kvcache.block_journal import NOBODY, BlockJournal
from worker.kvcache.block_ledger import BlockCopy, BlockLedger
from worker.kvcache.block_pool import BlockCounts, BlockPool
from worker.kvcache.block_table import BlockTable
from worker.kvcache.prefix_cache import CacheNamespace, PrefixCache, PrefixHit


@dataclass(slots=True, eq=False)
class _Pin:
    blocks: list[int]
    until_s: float


class BlockManager:
    """KV bookkeeping of one replica. `cache` None switches prefix caching off; `journal` is told of every block."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache | None,
        block_size: int,
        scheme: RouteScheme,
        kv_fingerprint: str = "",
        journal: BlockJournal | None = None,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._ledger = BlockLedger(pool, cache, journal)
        self._block_size = block_size
        self._scheme = scheme
        self._root = root_hash(scheme)
        self._kv_fingerprint = kv_fingerprint
        self._tables: dict[str, BlockTable] = {}
        self._pins: dict[str, _Pin] = {}

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def caches_prefixes(self) -> bool:
        return self._cache is not None

    @property
    def hit_unit(self) -> int:
        """Tokens: a cached prefix is a whole number of these."""
        return 1 if self._cache is None else self._cache.hit_unit

    @property
    def cache_changes(self) -> int:
        """While it stays the same, `cached_prefix` of a prompt does, too."""
        return 0 if self._cache is None else self._cache.changes

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

    def allocate(
        self,
        seq_id: str,
        tokens: Sequence[int],
        salt: str = "",
        *,
        spare_blocks: int = 0,
        need_logits: bool = True,
        read_cache: bool = True,
    ) -> int | None:
        """Reserve slots for all of `tokens`, sharing what the cache holds.

        Returns the number of cached tokens, or None, without side effects, when memory is short. `spare_blocks`: refuse
        unless so many blocks could still be taken afterwards. `need_logits`: leave at least one token to compute.
        `read_cache` False: share nothing, because every token shall be computed.
        """
        assert seq_id not in self._tables, f"sequence {seq_id} is already allocated"
        hit = self._match(tokens, salt, touch=True, whole=not need_logits) if read_cache else PrefixHit([])
        wanted = self._blocks_for(len(tokens)) - len(hit.blocks)
        self._ledger.lock(hit.blocks if hit.tail_block is None else [*hit.blocks, hit.tail_block])
        if hit.tail_block is not None and not self._ledger.fits(wanted, spare_blocks):
            self._ledger.unlock([hit.tail_block])  # locking the tail may be what made memory short
            hit = PrefixHit(hit.blocks)
        if not self._ledger.fits(wanted, spare_blocks):
            self._ledger.unlock(hit.blocks)
            return None
        self._ledger.note_shared(seq_id, hit.blocks)
        fresh = self._ledger.take(seq_id, wanted)
        if hit.tail_block is not None:
            self._ledger.copy(seq_id, hit.tail_block, fresh[0])
            self._ledger.unlock([hit.tail_block])
        cached = len(hit.blocks) * self._block_size + hit.tail_tokens
        table = BlockTable(self._namespace(salt), self._root_of(salt), hit.blocks + fresh, cached, len(hit.blocks))
        table.room = len(table.blocks) * self._block_size
        self._tables[seq_id] = table
        return cached

    def append_token(self, seq_id: str, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all, and make the slots behind the computed ones writable.

        False, without side effects, when no block can be had.
        """
        table = self._tables[seq_id]
        if num_tokens <= table.room:
            return True
        index = table.num_computed // self._block_size
        split = index < len(table.blocks) and not self._writable(table.blocks[index], table.num_computed)
        wanted = max(self._blocks_for(num_tokens) - len(table.blocks), 0) + split
        if not self._ledger.fits(wanted):
            return False
        fresh = self._ledger.take(seq_id, wanted)
        if split:
            shared, own = table.blocks[index], fresh.pop()
            self._ledger.copy(seq_id, shared, own)
            table.blocks[index] = own
            self._ledger.release(seq_id, [shared])
        table.blocks += fresh
        table.room = len(table.blocks) * self._block_size
        return True

    def fork(self, parent_id: str, child_id: str, num_tokens: int | None = None) -> None:
        """A new sequence that shares the parent's first `num_tokens` computed tokens (default: all of them)."""
        assert child_id not in self._tables, f"sequence {child_id} is already allocated"
        parent = self._tables[parent_id]
        count = parent.num_computed if num_tokens is None else num_tokens
        assert 0 < count <= parent.num_computed, f"{count} of {parent.num_computed} computed tokens cannot be forked"
        child = parent.fork(count, self._block_size, self._scheme.chunk_tokens)
        self._ledger.share(child_id, child.blocks)
        self._tables[child_id] = child

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
            self._insert(self._cache, seq_id, full)
        if tail:
            self._insert_tail(self._cache, seq_id, table)

    def free(self, seq_id: str) -> None:
        """Let go of the sequence's blocks, tail first. Unknown ids are ignored, so freeing twice is harmless."""
        table = self._tables.pop(seq_id, None)
        if table is not None:
            if self._cache is not None:
                self._insert_tail(self._cache, seq_id, table)
            self._ledger.release(seq_id, table.blocks)

    def pin(self, name: str, tokens: Sequence[int], salt: str = "", *, until_s: float) -> int:
        """Keep the cached whole blocks of `tokens` from eviction until that time; returns how many tokens that is.

        Pinning a name again replaces its pin. A pin never makes a request wait: `drop_pins` comes first.
        """
        hit = PrefixHit([]) if self._cache is None else self._cache.match(self._namespace(salt), tokens)
        self._ledger.share(f"pin:{name}", hit.blocks)
        self.unpin(name)
        if hit.blocks:
            self._pins[name] = _Pin(hit.blocks, until_s)
        return len(hit.blocks) * self._block_size

    def unpin(self, name: str) -> bool:
        """False when there was no such pin (any more)."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._ledger.release(f"pin:{name}", pin.blocks)
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
        self._ledger.note_evictions(NOBODY)
        for table in self._tables.values():
            table.committed_blocks = 0

    def take_copies(self) -> list[BlockCopy]:
        """Block copies to carry out, in this order, before the next write."""
        return self._ledger.take_copies()

    def take_events(self) -> list[CacheEvent]:
        return [] if self._cache is None else self._cache.take_events()

    def end_step(self) -> None:
        """A step has run and is booked: the journal counts it."""
        self._ledger.end_step()

    def check_invariants(self) -> None:
        for _ in self.audit():
            pass

    def audit(self) -> Iterator[None]:
        """`check_invariants` in pieces of well under a millisecond, for the engine's idle time.

        What it compares (ref counts and the references held, lists and counters, tree and cached flags) is only right
        as a whole, so nothing may change between two pieces: whoever has work drops the iterator, and a later one
        starts anew. Checking single blocks from where the last audit stopped would survive changes, but could not
        see a lost reference or a list that is too short.
        """
        yield from self._pool.audit(self._held())
        if self._cache is not None:
            yield from self._cache.audit()

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

    def _held(self) -> Iterator[int]:
        """Every reference there is, with repetition."""
        for table in self._tables.values():
            yield from table.blocks
        for pin in self._pins.values():
            yield from pin.blocks

    def _writable(self, block_id: int, position: int) -> bool:
        """The slots from `position` on belong to one sequence alone and the cache offers none of them."""
        if self._pool.ref_count(block_id) != 1:
            return False
        return self._cache is None or self._cache.claimed_slots(block_id) <= position % self._block_size

    def _namespace(self, salt: str) -> CacheNamespace:
        return CacheNamespace(self._kv_fingerprint, self._scheme.adapter, salt)

    def _root_of(self, salt: str) -> ChunkHash:
        return self._root if salt == self._scheme.salt else root_hash(self._scheme.with_salt(salt))

    def _match(self, tokens: Sequence[int], salt: str, *, touch: bool, whole: bool = False) -> PrefixHit:
        if self._cache is None:
            return PrefixHit([])
        wanted = tokens if whole else tokens[: len(tokens) - 1]
        return self._cache.match(self._namespace(salt), wanted, touch=touch)

    def _insert(self, cache: PrefixCache, seq_id: str, full: int) -> None:
        table = self._tables[seq_id]
        table.hash_chunks(full * self._block_size, self._scheme.chunk_tokens)
        kept = cache.insert(table.namespace, table.tokens, table.blocks[:full], table.chunk_hashes)
        self._ledger.note_evictions(seq_id)
        table.committed_blocks = full
        if kept == table.blocks[:full]:
            return
        last = max(index for index in range(full) if table.blocks[index] != kept[index])
        duplicate = table.blocks[last]
        holders = [seq_id]
        if self._pool.ref_count(duplicate) > 1:  # forks, after a reset: who holds a block must hold all before it
            holders = [name for name, other in self._tables.items() if duplicate in other.blocks[last : last + 1]]
        for holder in holders:
            self._fold(holder, kept[: last + 1])

    def _fold(self, seq_id: str, kept: Sequence[int]) -> None:
        blocks = self._tables[seq_id].blocks
        for index, stays in enumerate(kept):
            own = blocks[index]
            if own != stays:
                self._ledger.share(seq_id, [stays])
                blocks[index] = stays  # the live table moves before its own copy can be reused
                self._ledger.release(seq_id, [own])

    def _insert_tail(self, cache: PrefixCache, seq_id: str, table: BlockTable) -> None:
        full, behind = divmod(table.num_computed, self._block_size)
        if behind and table.committed_blocks == full and len(table.tokens) >= table.num_computed:
            cache.insert_tail(table.namespace, table.tokens[: table.num_computed], table.blocks[full])
            self._ledger.note_evictions(seq_id)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
