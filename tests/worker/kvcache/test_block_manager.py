"""BlockManager: sharing, partial reuse, forks with copy-on-write, pins, and refusals without side effects."""

from __future__ import annotations

import pytest

from cluster.core.hashing import RouteScheme, root_hash
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockCounts, BlockPool
from worker.kvcache.chunk_hash_cache import ChunkHashCache
from worker.kvcache.radix_tree import RadixTree

B = 16
SCHEME = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=4 * B)


def make(num_blocks: int = 16, *, fingerprint: str = "kv", partial: bool = True, cache: bool = True) -> BlockManager:
    pool = BlockPool(num_blocks)
    tree = RadixTree(pool, B, chunk_blocks=4, partial=partial)
    return BlockManager(pool, tree if cache else None, B, SCHEME, fingerprint)


def prefill(manager: BlockManager, seq_id: str, tokens: list[int], salt: str = "") -> int:
    """Allocate, and compute all of it; returns the cached tokens."""
    cached = manager.allocate(seq_id, tokens, salt)
    assert cached is not None
    manager.check_writable(seq_id, cached, len(tokens))
    manager.commit(seq_id, tokens, len(tokens), tail=True)
    manager.check_invariants()
    return cached


def write(manager: BlockManager, seq_id: str, tokens: list[int], token: int) -> None:
    """Decode: make room for `token`, write it, commit it."""
    at = len(tokens)
    assert manager.append_token(seq_id, at + 1)
    manager.check_writable(seq_id, at, at + 1)
    tokens.append(token)
    manager.commit(seq_id, tokens, at + 1)
    manager.check_invariants()


def test_the_articles_fork_at_token_30_of_50() -> None:
    """A has 50 tokens, B forks at 30: block 0 is shared, block 1 copied at B's first write, 2 and 3 are never B's."""
    manager = make()
    a = list(range(100, 150))
    prefill(manager, "A", a)
    blocks = list(manager.get_block_ids("A"))
    assert len(blocks) == 4
    manager.fork("A", "B", 30)
    manager.check_invariants()
    assert manager.get_block_ids("B") == blocks[:2]
    assert manager.take_copies() == []

    b = a[:30]
    write(manager, "B", b, 7)
    own = manager.get_block_ids("B")[1]
    assert own not in blocks
    assert manager.take_copies() == [(blocks[1], own)]
    assert manager.get_block_ids("B") == [blocks[0], own]
    for token in range(40):
        write(manager, "B", b, token)
    assert not set(manager.get_block_ids("B")) & set(blocks[1:])
    assert manager.get_block_ids("A") == blocks
    manager.free("A")
    manager.free("B")
    manager.check_invariants()
    assert manager.counts().in_use == 0


@pytest.mark.parametrize("cache", [True, False])
def test_the_last_of_several_forks_writes_in_place(cache: bool) -> None:
    manager = make(cache=cache)
    tokens = list(range(20))
    prefill(manager, "p", tokens)
    for name in "xyz":
        manager.fork("p", name)
    manager.free("p")
    manager.check_invariants()
    shared = manager.get_block_ids("x")[1]
    for number, name in enumerate("xyz"):
        write(manager, name, list(tokens), number)
    assert len(manager.take_copies()) == 2
    assert manager.get_block_ids("z")[1] == shared
    assert len({manager.get_block_ids(name)[1] for name in "xyz"}) == 3
    assert {manager.get_block_ids(name)[0] for name in "xyz"} == {manager.get_block_ids("x")[0]}


def test_a_fork_into_a_block_that_only_the_cache_holds_still_copies() -> None:
    """Its owner is gone, so the ref count is 1; but other requests may find the block's tokens."""
    manager = make()
    tokens = list(range(32))
    prefill(manager, "A", tokens)
    first, second = manager.get_block_ids("A")
    manager.fork("A", "B", 20)
    manager.free("A")
    write(manager, "B", tokens[:20], 99)
    ((source, target),) = manager.take_copies()
    assert source == second != target
    assert manager.cached_prefix([*tokens, 1]) == 32
    assert manager.get_block_ids("B") == [first, target]


def test_a_refused_write_changes_nothing() -> None:
    manager = make(num_blocks=2)
    tokens = list(range(20))
    prefill(manager, "A", tokens)
    manager.fork("A", "B")
    before = (manager.counts(), list(manager.get_block_ids("B")))
    assert not manager.append_token("B", 21)
    assert (manager.counts(), manager.get_block_ids("B"), manager.take_copies()) == (*before, [])
    manager.check_invariants()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 50])
def test_a_full_hit_computes_one_token(length: int) -> None:
    manager = make()
    tokens = list(range(length))
    prefill(manager, "cold", tokens)
    manager.free("cold")
    assert prefill(manager, "warm", tokens) == length - 1
    copies = manager.take_copies()
    assert len(copies) == (1 if (length - 1) % B else 0)


def test_whoever_reads_nothing_from_the_cache_still_writes_it() -> None:
    manager = make()
    tokens = list(range(40))
    prefill(manager, "A", tokens)
    assert manager.allocate("B", tokens, read_cache=False) == 0
    assert not set(manager.get_block_ids("B")) & set(manager.get_block_ids("A"))
    manager.commit("B", tokens, 40, tail=True)  # its whole blocks are duplicates, and folded into A's
    manager.check_invariants()
    assert manager.get_block_ids("B")[:2] == manager.get_block_ids("A")[:2]
    for seq_id in ("A", "B"):
        manager.free(seq_id)
    manager.check_invariants()
    assert manager.cached_prefix([*tokens, 1]) == 40


def test_part_of_a_block_is_copied_never_shared() -> None:
    manager = make()
    tokens = list(range(40))
    prefill(manager, "A", tokens)
    blocks = list(manager.get_block_ids("A"))
    other = [*tokens[:27], 500, 501, 502]
    assert prefill(manager, "B", other) == 27
    ((source, target),) = manager.take_copies()
    assert source == blocks[1]
    assert manager.get_block_ids("B") == [blocks[0], target]


def test_without_partial_reuse_only_whole_blocks_hit() -> None:
    manager = make(partial=False)
    tokens = list(range(40))
    prefill(manager, "A", tokens)
    assert prefill(manager, "B", [*tokens[:27], 500, 501]) == 16
    assert manager.take_copies() == []


def test_locking_the_tail_never_makes_a_request_unadmittable() -> None:
    """The pool's last block is the tail that would be copied: it is taken instead."""
    manager = make(num_blocks=2)
    tokens = list(range(20))
    prefill(manager, "A", tokens)
    manager.free("A")
    assert prefill(manager, "B", tokens) == 16
    assert manager.take_copies() == []


def test_a_block_is_folded_also_when_its_chunk_is_complete_only_later() -> None:
    """A cache of whole chunks takes nothing while a chunk is incomplete: two sequences bring the same one in pieces."""
    pool = BlockPool(16)
    cache = ChunkHashCache(pool, B, 2, lambda namespace: root_hash(SCHEME))
    scheme = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=2 * B)
    manager = BlockManager(pool, cache, B, scheme)
    tokens = list(range(2 * B))
    for name in "ab":
        assert manager.allocate(name, tokens) == 0
        manager.commit(name, tokens, B)
    assert manager.counts().in_use == 4
    for name in "ab":
        manager.commit(name, tokens, 2 * B)
        manager.check_invariants()
    assert manager.get_block_ids("a") == manager.get_block_ids("b")
    assert manager.counts().in_use == 2


def test_a_conversation_is_reused_to_the_last_token() -> None:
    manager = make(num_blocks=32)
    history: list[int] = []
    for turn in range(3):
        cached_before = max(len(history) - 1, 0)  # the newest token of an answer has no KV yet
        history = [*history, *range(1000 * turn, 1000 * turn + 21)]
        assert prefill(manager, f"t{turn}", history) == cached_before
        manager.take_copies()
        for step in range(13):
            tokens = list(history)
            history.append(5000 + 100 * turn + step)
            if step:
                write(manager, f"t{turn}", tokens[:-1], tokens[-1])
        manager.free(f"t{turn}")
        manager.check_invariants()


@pytest.mark.parametrize("other", ["salt", "fingerprint", "adapter"])
def test_another_namespace_never_hits(other: str) -> None:
    pool = BlockPool(16)
    tree = RadixTree(pool, B, chunk_blocks=4)
    scheme = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=4 * B)
    tuned = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=4 * B, adapter="x")
    first = BlockManager(pool, tree, B, scheme, "one")
    second = BlockManager(pool, tree, B, tuned if other == "adapter" else scheme, "two" if other != "salt" else "one")
    tokens = list(range(100))
    assert prefill(first, "a", tokens) == 0
    stored = first.take_events()
    first.free("a")
    assert prefill(second, "b", tokens, "x" if other == "salt" else "") == 0
    second.free("b")
    again = second.take_events()
    if other != "fingerprint":  # chunk hashes say what text means as tokens, so they do not see the weights
        assert not set(stored[0].chunk_hashes) & set(again[0].chunk_hashes)
    assert prefill(first, "c", tokens) == 99


def test_pins_outlast_pressure_and_end_with_their_time() -> None:
    manager = make(num_blocks=4)
    system = list(range(32))
    prefill(manager, "a", system)
    manager.free("a")
    assert manager.pin("system", system, until_s=10.0) == 32
    assert manager.allocate("big", list(range(500, 548))) is None
    assert prefill(manager, "small", list(range(500, 532))) == 0
    manager.free("small")
    assert manager.cached_prefix([*system, 1]) == 32
    manager.expire_pins(9.9)
    assert manager.allocate("big", list(range(600, 648))) is None
    manager.expire_pins(10.0)
    assert manager.allocate("big", list(range(600, 648))) == 0
    assert not manager.unpin("system")
    manager.check_invariants()


def test_a_pin_can_be_replaced_dropped_and_reset() -> None:
    manager = make()
    prefill(manager, "a", list(range(48)))
    manager.free("a")
    assert manager.pin("p", list(range(16)), until_s=1.0) == 16
    assert manager.pin("p", list(range(48)), until_s=1.0) == 48
    assert manager.counts().in_use == 3
    assert manager.pin("unknown", [9] * 16, until_s=1.0) == 0
    assert manager.drop_pins() and not manager.drop_pins()
    manager.pin("p", list(range(48)), until_s=1.0)
    manager.reset_cache()
    assert manager.counts() == BlockCounts(16, 0, 0, 16)


def test_spare_blocks_are_part_of_admission() -> None:
    manager = make(num_blocks=4)
    assert manager.allocate("a", list(range(32)), spare_blocks=3) is None
    assert manager.counts().free == 4
    assert manager.allocate("a", list(range(32)), spare_blocks=2) == 0


def test_a_reset_leaves_a_running_sequence_alone_and_it_enters_the_cache_again() -> None:
    manager = make()
    tokens = list(range(40))
    prefill(manager, "a", tokens)
    manager.reset_cache()
    assert manager.cached_prefix([*tokens, 1]) == 0
    for token in range(10):
        write(manager, "a", tokens, token)
    assert manager.cached_prefix([*tokens, 1]) == 48  # the block that became full brought its ancestors along
    manager.free("a")
    assert manager.cached_prefix([*tokens, 1]) == 50
