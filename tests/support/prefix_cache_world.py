"""A pool, a prefix cache and what BlockManager does around them, without a manager: the world of the cache tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash, RouteScheme, hash_prompt, root_hash
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.chunk_hash_cache import ChunkHashCache
from worker.kvcache.prefix_cache import CacheNamespace, PrefixCache, PrefixHit
from worker.kvcache.radix_tree import RadixTree

B = 4  # tokens of a block
CHUNK = 2  # blocks of a chunk
NS = CacheNamespace()
SCHEME = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=CHUNK * B)
UNIT_BLOCKS = {"radix": 1, "chunk": CHUNK}


def root_of(namespace: CacheNamespace) -> ChunkHash:
    return root_hash(SCHEME.with_salt(namespace.salt))


def chunk_hashes(namespace: CacheNamespace, tokens: Sequence[int]) -> list[ChunkHash]:
    return hash_prompt(root_of(namespace), tokens, CHUNK * B)


def tokens(*blocks: int) -> list[int]:
    """Four tokens a block; block n is n*10, n*10+1, ..."""
    return [10 * n + i for n in blocks for i in range(B)]


@dataclass(eq=False)
class Holder:
    """A sequence: its tokens and its block table."""

    namespace: CacheNamespace
    tokens: list[int]
    blocks: list[int]
    enters: bool = True  # False once the cache was cleared, and for its forks: their blocks are not inserted again

    def content(self, index: int) -> tuple[CacheNamespace, tuple[int, ...]]:
        """What the KV of one of its blocks depends on."""
        return self.namespace, tuple(self.tokens[: (index + 1) * B])


@dataclass
class World:
    """A pool, a cache, what BlockManager does around them, and what was written into each block."""

    pool: BlockPool
    cache: PrefixCache
    unit: int  # blocks that are found or missed together
    hashes: Callable[[CacheNamespace, Sequence[int]], list[ChunkHash]] = chunk_hashes
    holders: list[Holder] = field(default_factory=list)
    pages: dict[int, tuple[CacheNamespace, tuple[int, ...]]] = field(default_factory=dict)
    replayed: set[ChunkHash] = field(default_factory=set)
    check_events: bool = True
    found: dict[tuple[CacheNamespace, tuple[int, ...]], PrefixHit] = field(default_factory=dict)
    found_at: int = -1

    def compute(self, toks: list[int], namespace: CacheNamespace = NS, shared: Sequence[int] = ()) -> Holder | None:
        """Take the shared blocks and compute the others; nothing is inserted yet. None when memory is short."""
        holder = Holder(namespace, toks, list(shared))
        self.holders.append(holder)
        self.pool.share(shared)
        missing = len(toks) // B - len(shared)
        if missing > self.pool.num_free:
            self.evict(missing - self.pool.num_free)
        fresh = self.pool.allocate(missing)
        if fresh is None:
            self.stop(holder)
            return None
        holder.blocks += fresh
        for index in range(len(shared), len(holder.blocks)):
            self.pages[holder.blocks[index]] = holder.content(index)
        return holder

    def insert(self, holder: Holder, num_blocks: int | None = None) -> Holder:
        """The first `num_blocks` blocks (default: all) enter the cache; duplicates are folded."""
        if not holder.enters:
            return holder
        num_blocks = len(holder.blocks) if num_blocks is None else num_blocks
        toks = holder.tokens[: num_blocks * B]
        hashes = self.hashes(holder.namespace, toks)
        kept = self.cache.insert(holder.namespace, toks, holder.blocks[:num_blocks], hashes)
        assert len(kept) == num_blocks
        for index, stays in enumerate(kept):
            own = holder.blocks[index]
            if own != stays:
                self.pool.share([stays])
                holder.blocks[index] = stays
                self._release([own])
        self.check()
        return holder

    def start(self, toks: list[int], namespace: CacheNamespace = NS, *, reuse: bool = True) -> Holder | None:
        """Compute what is not cached (all of it without `reuse`) and insert it."""
        holder = self.compute(toks, namespace, self.match(toks, namespace) if reuse else ())
        return holder and self.insert(holder)

    def stop(self, holder: Holder) -> None:
        self.holders.remove(holder)
        self._release(holder.blocks)
        self.check()

    def run(self, toks: list[int], namespace: CacheNamespace = NS, *, reuse: bool = True) -> list[int]:
        """A whole life; returns its blocks."""
        holder = self.start(toks, namespace, reuse=reuse)
        assert holder is not None
        self.stop(holder)
        return holder.blocks

    def match(self, toks: Sequence[int], namespace: CacheNamespace = NS) -> list[int]:
        blocks = list(self.cache.match(namespace, toks, touch=False).blocks)
        self._check_content(Holder(namespace, list(toks), blocks))
        return blocks

    def evict(self, count: int) -> int:
        free, idle = self.pool.num_free, self.pool.num_evictable
        freed = self.cache.evict(count)
        assert freed == self.pool.num_free - free
        assert min(count, idle) <= freed < max(count, 1) + self.unit
        self.check()
        return freed

    def clear(self) -> None:
        self.cache.clear()
        for holder in self.holders:
            holder.enters = False
        self.check()

    def check(self) -> None:
        self._check_changes()
        self.pool.check_invariants(b for holder in self.holders for b in holder.blocks)
        self.cache.check_invariants()
        for holder in self.holders:
            self._check_content(holder)
        for event in self.cache.take_events():
            self._replay(event)
        assert not self.check_events or self.replayed == self.cache.present_chunks

    def _check_changes(self) -> None:
        """While the cache says that nothing changed, every prompt finds what it found."""
        prompts = dict.fromkeys((*self.found, *((one.namespace, tuple(one.tokens)) for one in self.holders)))
        found = {prompt: self.cache.match(*prompt, touch=False) for prompt in list(prompts)[-16:]}
        if self.cache.changes == self.found_at:
            assert all(self.found.get(prompt, hit) == hit for prompt, hit in found.items()), (
                "it changed, but does not say so"
            )
        self.found, self.found_at = found, self.cache.changes

    def _check_content(self, holder: Holder) -> None:
        for index, block_id in enumerate(holder.blocks):
            assert self.pages.get(block_id) == holder.content(index), "another sequence's KV"

    def _replay(self, event: CacheEvent) -> None:
        chunks = set(event.chunk_hashes)
        if event.kind is CacheEventKind.CLEARED:
            self.replayed.clear()
        elif event.kind is CacheEventKind.STORED:
            assert not self.check_events or not self.replayed & chunks, "a chunk was stored twice"
            self.replayed |= chunks
        else:
            assert not self.check_events or self.replayed >= chunks, "an absent chunk was removed"
            self.replayed -= chunks

    def _release(self, blocks: list[int]) -> None:
        self.cache.on_idle(self.pool.release(reversed(blocks)))


def make_world(kind: str, num_blocks: int = 16) -> World:
    pool = BlockPool(num_blocks)
    makers: dict[str, Callable[[], PrefixCache]] = {
        "radix": lambda: RadixTree(pool, B, CHUNK),
        "chunk": lambda: ChunkHashCache(pool, B, CHUNK, root_of),
    }
    return World(pool, makers[kind](), UNIT_BLOCKS[kind])
