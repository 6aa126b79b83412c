"""The state of a model-free KV world and what must hold in it at any time, worked out naively.

row     a sequence: a plain list of tokens, and how many of them have KV
pages   [block][layer][slot] -> (layer, lineage, position), lineage standing for all tokens up to there
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kv_oracle import CachedContent, Fingerprint, Lineages, Page, ReplayedChunks

from cluster.core.hashing import ChunkHash, RouteScheme, root_hash
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockCounts, BlockPool
from worker.kvcache.chunk_hash_cache import ChunkHashCache
from worker.kvcache.prefix_cache import CacheNamespace, PrefixCache
from worker.kvcache.radix_tree import RadixTree

LAYERS = 2
CHUNK_BLOCKS = 2
UNSEEN = 2_000_000  # a token that no prompt has
BLOCK_SIZE = 4
SCHEME = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=CHUNK_BLOCKS * BLOCK_SIZE)


class CacheKind(NamedTuple):
    """`grain`: a hit is a multiple of so many tokens. `slack`: so many blocks more than asked may be evicted."""

    make: Callable[[BlockPool], PrefixCache | None]
    grain: int
    slack: int = 0


def _root_of(namespace: CacheNamespace) -> ChunkHash:
    return root_hash(SCHEME.with_salt(namespace.salt))


CACHES = {
    "radix": CacheKind(lambda pool: RadixTree(pool, BLOCK_SIZE, CHUNK_BLOCKS), grain=1),
    "whole": CacheKind(lambda pool: RadixTree(pool, BLOCK_SIZE, CHUNK_BLOCKS, partial=False), grain=BLOCK_SIZE),
    "chunk": CacheKind(
        lambda pool: ChunkHashCache(pool, BLOCK_SIZE, CHUNK_BLOCKS, _root_of), SCHEME.chunk_tokens, CHUNK_BLOCKS - 1
    ),
    "off": CacheKind(lambda pool: None, grain=1),
}


@dataclass(eq=False)
class Row:
    name: str
    salt: str
    tokens: list[int]
    prints: list[list[Fingerprint]]  # [layer][position], what its KV must be
    computed: int = 0
    reserved: int = 0
    committed: int = 0  # whole blocks that the cache has been told of
    known: bool = False  # the manager has been told the computed tokens
    shares: bool = False  # forked, or a fork: its open block may have other holders
    prompt_done: bool = False

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed


@dataclass
class Pinned:
    salt: str
    tokens: list[int]
    blocks: list[int]
    until_s: float


class Accounts(NamedTuple):
    """What a refused operation must leave alone."""

    counts: BlockCounts
    refs: list[int]
    cached: list[bool]
    tables: dict[str, list[int]]
    num_sequences: int

    @property
    def idle(self) -> set[int]:
        return {block for block, cached in enumerate(self.cached) if cached and not self.refs[block]}


class KvState:
    """`check` is called after every call of the manager."""

    def __init__(self, kind: CacheKind, num_blocks: int) -> None:
        self.kind = kind
        self.pool = BlockPool(num_blocks)
        self.cache = kind.make(self.pool)
        self.manager = BlockManager(self.pool, self.cache, BLOCK_SIZE, SCHEME)
        self.rows: dict[str, Row] = {}
        self.pins: dict[str, Pinned] = {}
        self.pending: list[tuple[int, int]] = []  # copies to carry out before the next write
        self.stats: Counter[str] = Counter()
        self.lineages = Lineages(SCHEME)
        self.content = CachedContent(BLOCK_SIZE, kind.grain, self.lineages)
        self.pages: list[Page] = [[[None] * BLOCK_SIZE for _ in range(LAYERS)] for _ in range(num_blocks)]
        self._replayed = ReplayedChunks(self.lineages)

    def check(self) -> None:
        """Everything that must hold at any time."""
        copies = self.manager.take_copies()
        self.pending += copies
        self.stats["copies"] += len(copies)
        pages = list(self.pages)
        for source, target in self.pending:
            pages[target] = pages[source]
        self.check_histories(pages)
        self.manager.check_invariants()
        self._check_accounts()
        self._check_cache(pages)
        for row in self.rows.values():
            self.assert_found(row.salt, row.tokens[: row.committed * BLOCK_SIZE])
        for pin in self.pins.values():
            self.assert_found(pin.salt, pin.tokens)

    def check_histories(self, pages: Sequence[Page]) -> None:
        """Every live row finds its whole history in its blocks, in every layer."""
        for row in self.rows.values():
            blocks = self.manager.get_block_ids(row.name)
            assert len(blocks) >= blocks_for(max(row.computed, row.reserved)), "slots are missing"
            for number, slots in self.spans(row):
                first, page = number * BLOCK_SIZE, pages[blocks[number]]
                for prints, layer in zip(row.prints, page, strict=True):
                    found = layer[:slots]
                    assert found == prints[first : first + slots], (
                        f"row {row.name} has foreign KV in block {blocks[number]}: {found}"
                    )

    def accounts(self) -> Accounts:
        blocks = range(self.pool.num_blocks)
        return Accounts(
            self.manager.counts(),
            [self.pool.ref_count(block) for block in blocks],
            [self.pool.is_cached(block) for block in blocks],
            {name: list(self.manager.get_block_ids(name)) for name in self.rows},
            self.manager.num_sequences,
        )

    def prints(self, salt: str, tokens: Sequence[int]) -> list[list[Fingerprint]]:
        numbers = self.lineages.of(salt, tokens)
        return [[(layer, number, at) for at, number in enumerate(numbers)] for layer in range(LAYERS)]

    def findable(self, salt: str, tokens: Sequence[int]) -> int:
        """How many of these tokens a lookup must find now: what the pages hold, in the cache's grain."""
        hit = self.content.hit(self.lineages.of(salt, tokens))
        return hit - hit % self.kind.grain

    def assert_found(self, salt: str, tokens: Sequence[int]) -> None:
        """A lookup finds at least these tokens, in the cache's grain."""
        if self.cache is not None:
            wanted = len(tokens) - len(tokens) % self.kind.grain
            found = self.manager.cached_prefix([*tokens, UNSEEN], salt)
            assert found >= wanted, f"only {found} of {wanted} tokens are found"

    def holders(self) -> Counter[int]:
        tables = (self.manager.get_block_ids(name) for name in self.rows)
        return Counter(itertools.chain(*tables, *(pin.blocks for pin in self.pins.values())))

    def spans(self, row: Row) -> list[tuple[int, int]]:
        """The row's places with something computed: number in its table, and how many slots."""
        numbers = range(blocks_for(row.computed))
        return [(number, min(BLOCK_SIZE, row.computed - number * BLOCK_SIZE)) for number in numbers]

    def _check_accounts(self) -> None:
        holders, now = self.holders(), self.accounts()
        assert now.refs == [holders[block] for block in range(len(now.refs))], "a ref count is not its holders"
        in_use, idle, total = len(holders), len(now.idle), len(now.refs)
        assert now.counts == (total - idle - in_use, idle, in_use, total), now.counts

    def _check_cache(self, pages: Sequence[Page]) -> None:
        events = self.manager.take_events()
        if self.cache is None:
            assert not events
            return
        cached = (block for block in range(self.pool.num_blocks) if self.pool.is_cached(block))
        self.content.update(pages, {block: self.cache.claimed_slots(block) for block in cached})
        for event in events:
            self._replayed.apply(event)
            self.stats[event.kind] += len(event.chunk_hashes) or 1
        present = self.cache.present_chunks
        assert self._replayed.present == present, "the events do not add up to what the cache says"
        assert self.content.chunks() == present, "the pages do not hold what the cache says"


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)
