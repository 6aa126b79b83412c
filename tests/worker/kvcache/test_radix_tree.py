"""RadixTree alone: splitting, growing, eviction by blocks and wide nodes. The rest is in the conformance tests."""

from __future__ import annotations

import pytest
from prefix_cache_world import NS, B, World, make_world, tokens

from cluster.core.events import CacheEvent, CacheEventKind
from worker.kvcache.radix_tree import RadixTree


@pytest.fixture
def world() -> World:
    return make_world("radix")


def tree_of(world: World) -> RadixTree:
    assert isinstance(world.cache, RadixTree)
    return world.cache


def num_edges(world: World) -> int:
    return sum(1 for node in tree_of(world).nodes() if node.blocks)


def test_insert_inside_an_edge_splits_it(world: World) -> None:
    first = world.run(tokens(1, 2, 3))
    second = world.run(tokens(1, 2, 4))
    assert second[:2] == first[:2] and second[2] != first[2]
    assert world.match(tokens(1, 2, 3)) == first
    assert world.match(tokens(1, 2, 4)) == second
    assert num_edges(world) == 3
    assert world.pool.counts().cached == 4


def test_leaf_grows_in_place_as_a_sequence_decodes(world: World) -> None:
    holder = world.compute(tokens(1, 2, 3))
    assert holder is not None
    for full in (1, 2, 3):
        world.insert(holder, full)
    assert num_edges(world) == 1


def test_nothing_is_left_of_a_tree_without_blocks(world: World) -> None:
    world.run(tokens(1, 2))
    world.run(tokens(1, 3))
    assert world.evict(16) == 3
    assert list(tree_of(world).nodes()) == []


def test_a_chunk_is_present_until_its_last_block_goes(world: World) -> None:
    world.run(tokens(1, 2, 3, 4, 5))
    before = world.cache.present_chunks
    world.evict(1)  # block 5 ends no chunk
    assert world.cache.present_chunks == before and len(before) == 2
    world.evict(2)  # 4 and 3
    assert len(world.cache.present_chunks) == 1
    world.check_events = False
    world.cache.evict(1)
    assert world.cache.take_events() == [CacheEvent(CacheEventKind.REMOVED, tuple(world.replayed))]


def test_ten_thousand_children_under_one_node_are_found_and_evicted() -> None:
    world = make_world("radix", num_blocks=10_001)
    pool, tree = world.pool, tree_of(world)
    own = pool.allocate(1) or []
    tree.insert(NS, tokens(1), own, [])
    hashes = world.hashes
    for n in range(10_000):
        (leaf,) = pool.allocate(1) or []
        toks = [*tokens(1), n, n, n, n]
        tree.insert(NS, toks, [own[0], leaf], hashes(NS, toks))
        tree.on_idle(pool.release([leaf]))
    assert len(tree.match(NS, tokens(1) + [77] * B).blocks) == 2
    assert tree.evict(10_000) == 10_000
    pool.check_invariants(own)
    tree.check_invariants()
