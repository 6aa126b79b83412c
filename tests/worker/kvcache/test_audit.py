"""The audit: the same judgement as `check_invariants`, in short pieces, for every kind of damage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.core.hashing import RouteScheme
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.radix_tree import RadixTree

B = 4
NUM_BLOCKS = 400
SCHEME = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=2 * B)


def lived_in() -> BlockManager:
    """Blocks of all three states, a fork and a pin."""
    pool = BlockPool(NUM_BLOCKS)
    manager = BlockManager(pool, RadixTree(pool, B, chunk_blocks=2), B, SCHEME)
    for number in range(30):
        tokens = [*range(number % 5 * 4), *range(1000 * number, 1000 * number + 22)]
        assert manager.allocate(f"r{number}", tokens) is not None
        manager.take_copies()
        manager.commit(f"r{number}", tokens, len(tokens), tail=True)
        if number % 3:
            manager.free(f"r{number}")
    manager.fork("r0", "f", 10)
    assert manager.pin("p", [*range(4), *range(1000, 1022)], until_s=1.0) == 24
    return manager


def lose_a_reference(manager: BlockManager) -> None:
    manager.get_block_ids("r3").pop()


def hold_without_a_reference(manager: BlockManager) -> None:
    manager.get_block_ids("r3").append(manager.get_block_ids("r6")[0])


def forget_a_flag(manager: BlockManager) -> None:
    manager._pool._cached[next(manager._pool.idle_blocks())] = 0


def flag_a_free_block(manager: BlockManager) -> None:
    manager._pool._cached[NUM_BLOCKS - 1] = 1


def miscount(manager: BlockManager) -> None:
    manager._pool._num_free -= 1


def skip_a_free_block(manager: BlockManager) -> None:
    pool = manager._pool
    pool._unlink(NUM_BLOCKS - 2)


def swap_two_lists(manager: BlockManager) -> None:
    """A free block on the idle list and the other way round: both lengths stay right."""
    pool = manager._pool
    idle, free = next(pool.idle_blocks()), NUM_BLOCKS - 1
    for block_id, head in ((idle, pool._free_head), (free, pool._idle_head)):
        pool._unlink(block_id)
        pool._link_after(head, block_id)


def cross_a_link(manager: BlockManager) -> None:
    manager._pool._prev[NUM_BLOCKS - 1] = 0


def lose_a_node(manager: BlockManager) -> None:
    cache = manager._cache
    assert isinstance(cache, RadixTree)
    leaf = next(node for node in cache.nodes() if not node.children)
    leaf.detach(leaf.key)


DAMAGE = [
    lose_a_reference,
    hold_without_a_reference,
    forget_a_flag,
    flag_a_free_block,
    miscount,
    skip_a_free_block,
    swap_two_lists,
    cross_a_link,
    lose_a_node,
]


def test_a_sound_manager_passes_however_often_it_is_checked() -> None:
    manager = lived_in()
    counts = manager.counts()
    assert counts.free and counts.cached and counts.in_use
    for _ in range(3):
        for _ in manager.audit():
            pass
    manager.check_invariants()
    assert manager.counts() == counts


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda function: function.__name__)
def test_both_checks_see_every_damage(damage: Callable[[BlockManager], None]) -> None:
    manager = lived_in()
    damage(manager)
    with pytest.raises(AssertionError):
        manager.check_invariants()
    with pytest.raises(AssertionError):
        list(manager.audit())


def test_the_message_names_block_count_and_holders() -> None:
    manager = lived_in()
    lost = manager.get_block_ids("r3")[-1]
    lose_a_reference(manager)
    with pytest.raises(AssertionError, match=rf"\(block, count, held\) \[\({lost}, 1, 0\)\]"):
        list(manager.audit())


def test_pieces_are_short_whatever_the_pool_is_full_of() -> None:
    """Between two pieces at most about a thousand blocks are looked at; with 20,000 that makes many pieces."""
    pool = BlockPool(20_000)
    assert len(list(pool.audit([]))) >= 2 * 18
    blocks = pool.allocate(20_000)
    assert blocks is not None
    assert len(list(pool.audit(blocks))) >= 2 * 18
    assert len(list(BlockPool(400).audit([]))) == 0


def test_damage_behind_the_first_piece_is_found() -> None:
    pool = BlockPool(5_000)
    blocks = pool.allocate(5_000)
    assert blocks is not None
    pieces = pool.audit(blocks[:-1])
    next(pieces)
    with pytest.raises(AssertionError, match=r"\(4999, 1, 0\)"):
        list(pieces)
