"""What every PrefixCache must do. Radix tree and chunk table differ only in their unit: a block, or a chunk of two."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_cache_world import CHUNK, NS, UNIT_BLOCKS, B, Holder, World, chunk_hashes, make_world, root_of, tokens

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash
from worker.kvcache import chunk_hash_cache
from worker.kvcache.prefix_cache import CacheNamespace


@pytest.fixture(params=UNIT_BLOCKS)
def world(request: pytest.FixtureRequest) -> World:
    return make_world(request.param)


def test_match_returns_the_longest_prefix_of_whole_units(world: World) -> None:
    blocks = world.run(tokens(1, 2, 3, 4))
    assert world.match(tokens(1, 2, 3, 4)) == blocks
    assert world.match([*tokens(1, 2, 3, 4), 7, 7, 7, 7]) == blocks
    assert world.match(tokens(1, 2, 9, 4)) == blocks[:2]
    assert world.match([*tokens(1, 2), 30, 31, 32]) == blocks[:2]
    assert world.match(tokens(1, 2, 3)) == blocks[: 3 // world.unit * world.unit]
    for nothing in ([], tokens(1)[:3], tokens(9), tokens(2, 1), tokens(3, 4), tokens(1, 1)[1:]):
        assert world.match(nothing) == []


def test_one_other_token_anywhere_is_no_match(world: World) -> None:
    toks = tokens(1, 2, 3, 4)
    blocks = world.run(toks)
    for position in range(len(toks)):
        wrong = [*toks[:position], 999, *toks[position + 1 :]]
        assert world.match(wrong) == blocks[: position // (B * world.unit) * world.unit]


def test_namespaces_never_share(world: World) -> None:
    salted = CacheNamespace(salt="a")
    mine = world.run(tokens(1, 2), salted)
    assert world.match(tokens(1, 2), salted) == mine
    for other in (NS, CacheNamespace(salt="b"), CacheNamespace(adapter="a"), CacheNamespace(kv_fingerprint="a")):
        assert world.match(tokens(1, 2), other) == []
    assert world.run(tokens(1, 2)) != mine


def test_duplicates_are_folded_into_the_blocks_already_there(world: World) -> None:
    first = world.run(tokens(1, 2))
    longer = world.run(tokens(1, 2, 3, 4), reuse=False)
    assert longer[:2] == first
    assert world.match(tokens(1, 2, 3, 4)) == longer
    assert world.run(tokens(1, 2, 3, 4), reuse=False) == longer
    assert world.pool.counts().cached == 4


def test_a_sequence_enters_piece_by_piece(world: World) -> None:
    holder = world.compute(tokens(1, 2, 3, 4, 5))
    assert holder is not None
    own = list(holder.blocks)
    for done in (1, 2, 3, 4, 5):
        world.insert(holder, done)
        assert world.match(holder.tokens) == own[: done // world.unit * world.unit]
    assert holder.blocks == own
    world.stop(holder)
    assert world.pool.counts().cached == 5 // world.unit * world.unit
    assert world.pool.counts().in_use == 0


def test_two_that_compute_the_same_piece_by_piece_end_with_the_same_blocks(world: World) -> None:
    first, second = world.compute(tokens(1, 2, 3, 4)), world.compute(tokens(1, 2, 3, 4))
    assert first is not None and second is not None
    for done in (1, 2, 3, 4):
        world.insert(first, done)
        world.insert(second, done)
    assert first.blocks == second.blocks
    assert world.pool.counts().in_use == 4


def test_forks_that_differ_inside_a_chunk_are_all_found(world: World) -> None:
    parent = world.start(tokens(1, 2, 3, 4))
    assert parent is not None
    child = world.compute(tokens(1, 2, 3, 9, 5, 6), shared=parent.blocks[:3])
    assert child is not None
    world.insert(child)
    assert child.blocks[:3] == parent.blocks[:3]
    assert world.match(child.tokens) == child.blocks
    assert world.match(parent.tokens) == parent.blocks
    world.stop(parent)
    world.evict(1)
    assert world.match(parent.tokens) == parent.blocks[: 4 - world.unit]
    assert world.match(child.tokens) == child.blocks
    world.stop(child)
    world.evict(16)
    assert world.pool.num_free == 16


def test_cached_blocks_claim_all_their_slots_and_others_none(world: World) -> None:
    holder = world.start(tokens(1, 2, 3))
    assert holder is not None
    claims = [world.cache.claimed_slots(block) for block in holder.blocks]
    assert claims == ([B, B, B] if world.unit == 1 else [B, B, 0])


def test_eviction_takes_the_end_of_a_chain_first_and_leaves_no_hole(world: World) -> None:
    blocks = world.run(tokens(1, 2, 3, 4, 5, 6))
    while blocks:
        assert world.evict(1) == world.unit
        blocks = blocks[: -world.unit]
        assert world.match(tokens(1, 2, 3, 4, 5, 6)) == blocks
    assert world.evict(1) == 0


def test_eviction_is_least_recently_used_first(world: World) -> None:
    old, new = tokens(1, 2), tokens(3, 4)
    for toks in (old, new, old):
        world.cache.match(NS, toks)
        world.run(toks)
    assert world.evict(2) == 2
    assert len(world.match(old)) == 2
    assert world.match(new) == []


def test_looking_without_touching_does_not_change_the_order(world: World) -> None:
    world.run(tokens(1, 2))
    world.run(tokens(3, 4))
    world.cache.match(NS, tokens(1, 2), touch=False)
    world.evict(2)
    assert world.match(tokens(1, 2)) == []
    assert len(world.match(tokens(3, 4))) == 2


def test_blocks_in_use_are_never_evicted(world: World) -> None:
    world.run(tokens(1, 2, 3, 4))
    holder = world.start(tokens(1, 2))
    assert holder is not None
    assert world.evict(16) == 2
    assert world.match(tokens(1, 2, 3, 4)) == holder.blocks
    world.stop(holder)
    assert world.evict(16) == 2
    assert world.pool.num_free == 16


def test_a_parent_goes_after_its_last_child(world: World) -> None:
    parent = world.run(tokens(1, 2))
    world.run(tokens(1, 2, 3, 4))
    world.run(tokens(1, 2, 5, 6))
    assert world.evict(4) == 4
    assert world.match(tokens(1, 2)) == parent
    assert world.evict(16) == 2


def test_chunk_events_are_stored_parent_first_and_removed_child_first(world: World) -> None:
    world.check_events = False
    holder = world.compute(tokens(1, 2, 3, 4, 5))
    assert holder is not None
    hashes = chunk_hashes(NS, holder.tokens)
    for expected in ([CacheEvent(CacheEventKind.STORED, tuple(hashes))], []):
        world.cache.insert(NS, holder.tokens, holder.blocks, hashes)
        assert world.cache.take_events() == expected
    assert world.cache.present_chunks == set(hashes)
    world.stop(holder)
    world.cache.evict(16)
    removed = [chunk for event in world.cache.take_events() for chunk in event.chunk_hashes]
    assert removed == hashes[::-1]
    assert world.cache.present_chunks == set()


def test_clear_frees_idle_blocks_leaves_the_others_and_says_so_once(world: World) -> None:
    world.run(tokens(5, 6))
    holder = world.start(tokens(1, 2, 3, 4))
    assert holder is not None
    world.cache.clear()
    assert world.cache.take_events() == [CacheEvent(CacheEventKind.CLEARED)]
    world.clear()
    assert world.match(tokens(1, 2)) == []
    assert world.pool.counts().free == 12
    assert not set(world.run(tokens(1, 2, 3, 4))) & set(holder.blocks)


# Few values and short chunks, so that prompts share, differ inside chunks and come again.
prompts = st.lists(st.integers(1, 3), min_size=1, max_size=7).map(lambda blocks: tokens(*blocks))
actions = st.one_of(
    st.tuples(st.just("start"), st.tuples(prompts, st.booleans(), st.sampled_from([NS, CacheNamespace(salt="s")]))),
    st.tuples(st.just("stop"), st.integers(0, 9)),
    st.tuples(st.just("fork"), st.tuples(st.integers(0, 9), st.integers(1, 6), prompts)),
    st.tuples(st.just("evict"), st.integers(1, 6)),
    st.tuples(st.just("clear"), st.none()),
)
Unit = tuple[CacheNamespace, tuple[int, ...]]  # a unit of blocks, by all tokens up to its end


def drive(world: World, name: str, value: Any) -> Holder | None:
    """One action; a sequence that it started, which has not entered the cache yet."""
    if name == "start":
        toks, reuse, namespace = value
        return world.compute(toks, namespace, world.match(toks, namespace) if reuse else ())
    if name == "fork" and world.holders:
        parent = world.holders[value[0] % len(world.holders)]
        keep = min(value[1], len(parent.blocks))
        child = world.compute(parent.tokens[: keep * B] + value[2], parent.namespace, parent.blocks[:keep])
        if child is not None:
            child.enters = parent.enters
        return child
    if name == "stop" and world.holders:
        world.stop(world.holders[value % len(world.holders)])
    elif name == "evict":
        world.evict(value)
    elif name == "clear":
        world.clear()
    return None


class Oracle:
    """A dictionary from token prefixes to blocks, filled by hand, beside the cache."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.found: dict[Unit, list[int]] = {}

    def apply(self, name: str, value: Any) -> None:
        holder = drive(self.world, name, value)
        if name == "clear":
            self.found.clear()
        self._forget_evicted(but_not=holder)
        if holder is not None:
            self._note(self.world.insert(holder))
        self._compare()

    def _units(self, holder: Holder) -> list[tuple[Unit, list[int]]]:
        step = self.world.unit
        ends = range(step, len(holder.blocks) + 1, step)
        return [(holder.content(end - 1), holder.blocks[end - step : end]) for end in ends]

    def _note(self, holder: Holder) -> None:
        for unit, blocks in self._units(holder) if holder.enters else ():
            assert self.found.setdefault(unit, blocks) == blocks, "a duplicate was not folded"

    def _forget_evicted(self, but_not: Holder | None) -> None:
        """`but_not`: has not entered yet, and may have got the blocks of what was evicted for it."""
        match = self.world.match
        gone = [unit for unit, blocks in self.found.items() if match(unit[1], unit[0])[-1:] != blocks[-1:]]
        others = [holder for holder in self.world.holders if holder is not but_not and holder.enters]
        held = {unit for holder in others for unit, _ in self._units(holder)}
        for unit in gone:
            assert unit not in held, "a block in use was evicted"
            del self.found[unit]

    def _compare(self) -> None:
        for namespace, toks in self.found:
            longer = [*toks, *tokens(1, 2, 3)]
            assert self.world.match(longer, namespace) == self._expected(namespace, longer)
        cached = {b for b in range(self.world.pool.num_blocks) if self.world.pool.is_cached(b)}
        assert cached == {block_id for blocks in self.found.values() for block_id in blocks}
        chunks = {chunk for namespace, toks in self.found for chunk in chunk_hashes(namespace, toks)}
        assert self.world.cache.present_chunks == chunks

    def _expected(self, namespace: CacheNamespace, toks: list[int]) -> list[int]:
        step, blocks = self.world.unit * B, list[int]()
        for end in range(step, len(toks) + 1, step):
            unit = self.found.get((namespace, tuple(toks[:end])))
            if unit is None:
                break
            blocks += unit
        return blocks


@pytest.mark.parametrize("kind", UNIT_BLOCKS)
@settings(max_examples=1000 if os.environ.get("KVRAY_LONG") else 80, deadline=None)
@given(script=st.lists(actions, max_size=40), num_blocks=st.integers(6, 24))
def test_a_random_life_agrees_with_a_dictionary(kind: str, script: list[tuple[str, Any]], num_blocks: int) -> None:
    oracle = Oracle(make_world(kind, num_blocks))
    for name, value in script:
        oracle.apply(name, value)
    world = oracle.world
    while world.holders:
        world.stop(world.holders[0])
    world.evict(num_blocks)
    assert world.pool.num_free == num_blocks


@pytest.mark.parametrize("kind", UNIT_BLOCKS)
@pytest.mark.parametrize("values", [1, 2, 3])
@settings(max_examples=300 if os.environ.get("KVRAY_LONG") else 30, deadline=None)
@given(script=st.lists(actions, max_size=40), num_blocks=st.integers(6, 24))
def test_colliding_hashes_never_give_a_wrong_answer(
    kind: str, values: int, script: list[tuple[str, Any]], num_blocks: int
) -> None:
    """With so few hashes content may be missed, but what is found is right, and all of it can be evicted."""
    world = make_world(kind, num_blocks)
    world.check_events = False

    def hash_weakly(parent: ChunkHash, toks: Sequence[int]) -> ChunkHash:
        return ChunkHash(bytes([(sum(parent) + sum(toks)) % values]))

    def all_hashes(namespace: CacheNamespace, toks: Sequence[int]) -> list[ChunkHash]:
        size = CHUNK * B
        pieces = (toks[at : at + size] for at in range(0, len(toks) - size + 1, size))
        return list(itertools.accumulate(pieces, hash_weakly, initial=root_of(namespace)))[1:]

    world.hashes = all_hashes
    with mock.patch.object(chunk_hash_cache, "hash_chunk", hash_weakly):
        for name, value in script:
            holder = drive(world, name, value)
            if holder is not None:
                world.insert(holder)
            for live in world.holders:
                world.match(live.tokens, live.namespace)  # which compares the content of what it finds
        while world.holders:
            world.stop(world.holders[0])
        world.evict(num_blocks)
    assert world.pool.num_free == num_blocks
