"""How much is computed twice: nothing that the cache could hold. And two lives of blocks that went wrong once."""

from __future__ import annotations

import fake_engine as fakes
import kv_world
import pytest

from cluster.core.hashing import RouteScheme
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.radix_tree import RadixTree


@pytest.mark.parametrize("together", [True, False])
def test_a_hundred_equal_prompts_compute_it_once_and_one_token_more_each(together: bool) -> None:
    fake = fakes.make_fake_engine(num_blocks=400, block_size=16, max_num_seqs=128)
    prompt = [(7 * i) % 900 for i in range(1000)]
    ids = []
    for _ in range(100):
        ids.append(fake.add(prompt, max_tokens=1))
        if not together:
            fake.finish()
    fake.finish()
    answer = fakes.expected_answer(prompt, 1)
    assert all(fake.answers[request] == answer for request in ids)
    assert [fake.cached[request] for request in ids] == [0] + [999] * 99
    assert fake.runner.computed_tokens == 1000 + 99


def test_a_chat_of_three_turns_is_reused_to_the_last_token() -> None:
    """Prompts and answers; only an answer's newest token has no KV when the answer ends."""
    fake = fakes.make_fake_engine(num_blocks=64)
    history: list[int] = []
    for turn in range(3):
        reusable = max(0, len(history) - 1)
        history = [*history, *range(100 * turn, 100 * turn + 17)]
        request = fake.add(history, max_tokens=11)
        computed = fake.runner.computed_tokens
        fake.finish()
        assert fake.cached[request] == reusable
        assert fake.runner.computed_tokens - computed == len(history) - reusable + 10
        assert fake.answers[request] == fakes.expected_answer(history, 11)
        history += fake.answers[request]


def test_copies_of_one_step_are_carried_out_in_order() -> None:
    """Q's copy reads a cached tail that the same step then evicts, to copy Q's block into it for a fork."""
    pool = BlockPool(3)
    scheme = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=8)
    manager = BlockManager(pool, RadixTree(pool, 4, chunk_blocks=2), 4, scheme)
    prompt = [1, 2, 3, 4, 5, 6]
    manager.allocate("p", prompt)
    manager.commit("p", prompt, 6, tail=True)
    _, tail = manager.get_block_ids("p")
    manager.free("p")
    assert manager.allocate("q", [*prompt, 7]) == 6
    copied = manager.get_block_ids("q")[1]
    manager.fork("q", "fork", 6)
    assert manager.append_token("q", 7)
    assert manager.get_block_ids("q")[1] == tail
    assert manager.take_copies() == [(tail, copied), (copied, tail)]


@pytest.mark.parametrize("cache", ["radix", "chunk"])
def test_after_a_reset_forks_move_together_to_blocks_that_others_brought(cache: str) -> None:
    """A fork that kept a duplicate of block 0 held block 1 without its cached ancestor, which then looked evictable."""
    world = kv_world.KvWorld(cache, num_blocks=8)
    parent = world.admit([1] * 9, "")
    assert parent is not None
    world.step({parent.name: 9})
    fork = world.fork(parent, 9)
    world.reset()
    other = world.admit([1] * 9, "")  # computes the beginning anew, and its blocks enter the cache
    assert other is not None
    world.step({other.name: 4 if cache == "radix" else 8})
    parent.tokens += [2] * 4
    parent.prints = world.prints("", parent.tokens)
    world.step({parent.name: 4})
    assert world.manager.get_block_ids(fork.name)[:2] == world.manager.get_block_ids(parent.name)[:2]
    world.free(other)
    world.free(parent)
    counts = world.manager.counts()
    assert counts.in_use == 3
    assert world.admit([7] * 4 * (counts.free + counts.cached), "") is not None
