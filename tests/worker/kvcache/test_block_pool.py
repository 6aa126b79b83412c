"""BlockPool: ref counts, the cached flag and refusal without side effects."""

import pytest

from worker.kvcache.block_pool import BlockCounts, BlockPool


def test_counts_add_up_through_a_life() -> None:
    pool = BlockPool(4)
    assert pool.counts() == BlockCounts(4, 0, 0, 4)
    blocks = pool.allocate(3)
    assert blocks is not None and len(set(blocks)) == 3
    assert pool.counts() == BlockCounts(1, 0, 3, 4)
    pool.mark_cached(blocks[:1])
    assert pool.release(blocks[1::-1]) == blocks[:1]
    assert pool.counts() == BlockCounts(2, 1, 1, 4)
    pool.check_invariants(held=[blocks[2]])
    pool.unmark_cached(blocks[:1])
    assert pool.counts() == BlockCounts(3, 0, 1, 4)
    pool.check_invariants(held=[blocks[2]])


def test_refused_allocation_changes_nothing() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    assert pool.allocate(2) is None
    assert pool.counts() == BlockCounts(1, 0, 1, 2)


def test_shared_block_is_free_only_after_the_last_release() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1) or []
    pool.share([block])
    assert pool.release([block]) == []
    assert pool.num_free == 0
    assert pool.release([block]) == []
    assert pool.num_free == 1


def test_released_blocks_that_are_cached_become_idle_in_the_order_of_their_release() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4) or []
    pool.mark_cached(blocks[:3])
    pool.share(blocks[1:2])
    assert pool.release(reversed(blocks)) == [blocks[2], blocks[0]]
    assert list(pool.idle_blocks()) == [blocks[2], blocks[0]]
    assert pool.counts() == BlockCounts(1, 2, 1, 4)
    pool.check_invariants(held=blocks[1:2])


def test_idle_cached_block_can_be_shared_again() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1) or []
    pool.mark_cached([block])
    assert pool.release([block]) == [block]
    assert pool.num_evictable == 1
    pool.share([block])
    assert pool.num_evictable == 0 and pool.ref_count(block) == 1


@pytest.mark.parametrize("misuse", ["release", "share", "cache"])
def test_misuse_of_a_free_block_is_an_internal_error(misuse: str) -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError):
        {"release": pool.release, "share": pool.share, "cache": pool.mark_cached}[misuse]([0])


def test_invariant_check_sees_a_lost_reference() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="ref counts differ"):
        pool.check_invariants(held=[])


def test_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)
