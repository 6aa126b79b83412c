"""RadixTree: matching, splitting, folding duplicates, LRU eviction and chunk events."""

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash, RouteScheme, hash_prompt, root_hash
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.prefix_cache import CacheNamespace
from worker.kvcache.radix_tree import RadixTree

B = 4
NS = CacheNamespace()
SCHEME = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=2 * B)


def tokens(*blocks: int) -> list[int]:
    """Four tokens a block; block n is n*10, n*10+1, ..."""
    return [10 * n + i for n in blocks for i in range(B)]


class Cache:
    """A pool and a tree with the bookkeeping a sequence would do."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, B, chunk_blocks=2)

    def hashes(self, toks: list[int]) -> list[ChunkHash]:
        return hash_prompt(root_hash(SCHEME), toks, SCHEME.chunk_tokens)

    def put(self, toks: list[int], namespace: CacheNamespace = NS) -> list[int]:
        """Compute, insert and let go; returns the canonical blocks."""
        own = self.pool.allocate(len(toks) // B)
        assert own is not None
        kept = self.tree.insert(namespace, toks, own, self.hashes(toks))
        for index, (mine, stays) in enumerate(zip(own, kept, strict=True)):
            if mine != stays:
                self.pool.share(stays)
                assert self.pool.release(mine)
                own[index] = stays
        for block in reversed(own):
            if self.pool.release(block) and self.pool.is_cached(block):
                self.tree.on_idle(block)
        self.check()
        return kept

    def check(self, held: list[int] | None = None) -> None:
        self.pool.check_invariants(held or [])
        self.tree.check_invariants()


def test_match_returns_whole_blocks_of_the_longest_prefix() -> None:
    cache = Cache()
    blocks = cache.put(tokens(1, 2, 3))
    assert cache.tree.match(NS, tokens(1, 2, 3)).blocks == blocks
    assert cache.tree.match(NS, tokens(1, 2, 9)).blocks == blocks[:2]
    assert cache.tree.match(NS, [*tokens(1, 2), 30, 31, 32]).blocks == blocks[:2]
    assert cache.tree.match(NS, tokens(1)[:3]).blocks == []
    assert cache.tree.match(NS, []).blocks == []
    assert cache.tree.match(NS, tokens(9)).blocks == []


def test_insert_inside_an_edge_splits_it() -> None:
    cache = Cache()
    first = cache.put(tokens(1, 2, 3))
    second = cache.put(tokens(1, 2, 4))
    assert second[:2] == first[:2] and second[2] != first[2]
    assert cache.tree.match(NS, tokens(1, 2, 3)).blocks == first
    assert cache.tree.match(NS, tokens(1, 2, 4)).blocks == second
    assert sum(1 for node in cache.tree.nodes() if node.blocks) == 3
    assert cache.pool.counts().cached == 4


def test_duplicates_are_folded_into_the_blocks_already_there() -> None:
    cache = Cache()
    first = cache.put(tokens(1, 2))
    assert cache.put(tokens(1, 2)) == first
    assert cache.pool.counts().cached == 2


def test_equal_first_tokens_but_different_rest_of_block_is_no_match() -> None:
    cache = Cache()
    cache.put([1, 2, 3, 4])
    assert cache.tree.match(NS, [1, 2, 3, 5]).blocks == []


def test_namespaces_never_share() -> None:
    cache = Cache()
    cache.put(tokens(1, 2), CacheNamespace(salt="a"))
    assert cache.tree.match(CacheNamespace(salt="b"), tokens(1, 2)).blocks == []
    assert cache.tree.match(NS, tokens(1, 2)).blocks == []


def test_eviction_takes_the_tail_of_a_chain_first_and_leaves_no_hole() -> None:
    cache = Cache(num_blocks=3)
    blocks = cache.put(tokens(1, 2, 3))
    assert cache.tree.evict(1) == 1
    cache.check()
    assert cache.tree.match(NS, tokens(1, 2, 3)).blocks == blocks[:2]


def test_eviction_is_least_recently_used_first() -> None:
    cache = Cache()
    old, new = tokens(1, 2), tokens(3, 4)
    cache.put(old)
    cache.put(new)
    cache.tree.match(NS, old)
    cache.tree.evict(2)
    cache.check()
    assert len(cache.tree.match(NS, old).blocks) == 2
    assert cache.tree.match(NS, new).blocks == []


def test_looking_without_touching_does_not_change_the_order() -> None:
    cache = Cache()
    cache.put(tokens(1))
    cache.put(tokens(2))
    cache.tree.match(NS, tokens(1), touch=False)
    cache.tree.evict(1)
    assert cache.tree.match(NS, tokens(1)).blocks == []


def test_blocks_in_use_are_never_evicted() -> None:
    cache = Cache()
    blocks = cache.put(tokens(1, 2, 3))
    for block in blocks[:2]:
        cache.pool.share(block)
    assert cache.tree.evict(10) == 1
    cache.check(held=blocks[:2])
    for block in reversed(blocks[:2]):
        cache.pool.release(block)
        cache.tree.on_idle(block)
    assert cache.tree.evict(10) == 2
    cache.check()
    assert cache.pool.num_free == 16


def test_parent_becomes_evictable_when_its_last_child_is_gone() -> None:
    cache = Cache()
    cache.put(tokens(1, 2))
    cache.put(tokens(1, 3))
    assert cache.tree.evict(16) == 3
    cache.check()
    assert list(cache.tree.nodes()) == []


def test_leaf_grows_in_place_as_a_sequence_decodes() -> None:
    cache = Cache()
    own = cache.pool.allocate(3) or []
    toks = tokens(1, 2, 3)
    for full in (1, 2, 3):
        assert cache.tree.insert(NS, toks[: full * B], own[:full], cache.hashes(toks)) == own[:full]
        cache.check(held=own)
    assert sum(1 for node in cache.tree.nodes() if node.blocks) == 1


def test_chunk_events_follow_the_last_block_of_each_chunk() -> None:
    cache = Cache()
    toks = tokens(1, 2, 3, 4, 5)
    first, second = cache.hashes(toks)
    cache.put(toks)
    assert cache.tree.take_events() == [CacheEvent(CacheEventKind.STORED, (first, second))]
    assert cache.tree.present_chunks == {first, second}
    cache.put(toks)
    assert cache.tree.take_events() == []
    cache.tree.evict(1)  # block 5 ends no chunk
    assert cache.tree.take_events() == []
    cache.tree.evict(3)
    assert cache.tree.take_events() == [CacheEvent(CacheEventKind.REMOVED, (second, first))]
    assert cache.tree.present_chunks == set()


def test_clear_frees_idle_blocks_and_says_so_once() -> None:
    cache = Cache()
    blocks = cache.put(tokens(1, 2))
    cache.pool.share(blocks[0])
    cache.tree.take_events()
    cache.tree.clear()
    assert cache.tree.take_events() == [CacheEvent(CacheEventKind.CLEARED)]
    assert cache.tree.match(NS, tokens(1, 2)).blocks == []
    cache.check(held=blocks[:1])
    cache.pool.release(blocks[0])
    assert cache.pool.num_free == 16


def test_ten_thousand_children_under_one_node_are_found_and_evicted() -> None:
    cache = Cache(num_blocks=10_001)
    own = cache.pool.allocate(1) or []
    cache.tree.insert(NS, tokens(1), own, [])
    for n in range(10_000):
        (leaf,) = cache.pool.allocate(1) or []
        toks = [*tokens(1), n, n, n, n]
        cache.tree.insert(NS, toks, [own[0], leaf], [ChunkHash(n.to_bytes(16, "little"))])
        cache.pool.release(leaf)
        cache.tree.on_idle(leaf)
    assert len(cache.tree.match(NS, tokens(1) + [77] * 4).blocks) == 2
    assert cache.tree.evict(10_000) == 10_000
    cache.check(held=own)
