"""The bugs of other engines that concern the cache, forks and resets, one test each (research note, section 4).

Scenarios 1, 7, 10, 11, 12 (first half), 20 (reset) and 23 are in test_scheduler.py, 26 in test_sequence_group.py and
test_beam_search*.py, 8 in kvcache/test_kv_driver.py and kvcache/test_kv_state_machine.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import fake_engine as fakes
import kv_world
import pytest
from kv_state import Row

from cluster.core.hashing import ChunkHash, RouteScheme
from cluster.core.request import FinishReason
from worker.kvcache import block_table, chunk_hash_cache
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.radix_tree import RadixTree

CACHES = pytest.mark.parametrize("cache", ["radix", "chunk"])
PROMPT = list(range(1, 14))


def extend(world: kv_world.KvWorld, row: Row, tokens: Sequence[int]) -> None:
    """The row computes these tokens behind the ones it has, one step each."""
    for token in tokens:
        row.tokens.append(token)
        row.prints = world.prints(row.salt, row.tokens)
        world.step({row.name: 1})


def admitted(world: kv_world.KvWorld, tokens: Sequence[int], *, compute: bool = True) -> Row:
    row = world.admit(tokens, "")
    assert row is not None
    if compute:
        world.step({row.name: row.uncomputed})
    return row


@CACHES
@pytest.mark.parametrize("length", range(4, 13))
def test_preempted_at_any_length_of_its_last_block(cache: str, length: int) -> None:
    """4.3 and 4.25: the victim is preempted with every length mod the block size; greedy and seeded rows go on."""
    fake = fakes.make_fake_engine(num_blocks=8, prefix_cache=cache)
    older, newer = list(range(1, 10)), list(range(50, 50 + length))
    a = fake.add(older, max_tokens=18)
    b = fake.add(newer, max_tokens=18, seed=7)
    fake.finish()
    assert fake.frames[-1].load.preemptions >= 1
    assert fake.answers[a] == fakes.expected_answer(older, 18)
    assert fake.answers[b] == fakes.expected_sample(newer, 18, seed=7)


@CACHES
def test_a_duplicate_insert_remaps_the_live_row(cache: str) -> None:
    """4.4: A and B compute the same prompt at once; B's blocks are freed, reused by C, and B decodes undisturbed."""
    world = kv_world.KvWorld(cache, num_blocks=8)
    a, b = admitted(world, range(8), compute=False), admitted(world, range(8), compute=False)
    own = list(world.manager.get_block_ids(b.name))
    world.step({a.name: 8, b.name: 8})
    assert world.manager.get_block_ids(b.name) == world.manager.get_block_ids(a.name)
    assert world.manager.counts().free == 6
    c = admitted(world, range(100, 116))
    assert set(own) <= set(world.manager.get_block_ids(c.name))
    extend(world, b, [50, 51, 52, 53, 54])
    assert world.manager.counts().in_use == 8


@CACHES
def test_aborted_in_the_middle_of_its_prefill(cache: str) -> None:
    """4.5: what two pieces computed is found by the next request, whoever filled the freed blocks in between."""
    fake = fakes.make_fake_engine(num_blocks=10, token_budget=8, prefix_cache=cache)
    prompt = list(range(1, 31))
    aborted = fake.add(prompt)
    fake.step()
    fake.step()
    fake.cancel(aborted)
    filler = fake.add(list(range(100, 120)), max_tokens=4)
    fake.finish()
    again = fake.add(prompt, max_tokens=4)
    fake.finish()
    assert fake.cached[again] == 16
    assert fake.answers[again] == fakes.expected_answer(prompt, 4)
    assert fake.answers[filler] == fakes.expected_answer(list(range(100, 120)), 4)
    load = fake.frames[-1].load
    assert (load.in_use_blocks, load.free_blocks + load.cached_blocks) == (0, 10)


@pytest.mark.parametrize("cache", ["radix", "chunk", "off"])
@pytest.mark.parametrize("end", ["length", "stop", "abort"])
def test_the_last_slot_is_freed_once(cache: str, end: str) -> None:
    """4.6: 100 decoded tokens, then idle: every block is free or cached, however the request ended."""
    fake = fakes.make_fake_engine(prefix_cache=cache)
    answer = fakes.expected_answer([5], 100)
    stops = (answer[-1],) if end == "stop" else ()
    request = fake.add([5], max_tokens=None if end == "abort" else 100, stop_token_ids=stops)
    if end == "abort":
        while len(fake.answers[request]) < 100:
            fake.step()
        fake.cancel(request)
    fake.finish()
    assert fake.answers[request][:100] == answer[: len(fake.answers[request])]
    load = fake.frames[-1].load
    assert (load.in_use_blocks, load.free_blocks + load.cached_blocks) == (0, 32)
    assert (load.cached_blocks > 0) == (cache != "off")


def test_the_end_of_a_chain_goes_first_and_a_missing_head_is_no_hit() -> None:
    """4.9: three cached blocks, one free, two wanted: block 3 goes. When block 1 is gone, nothing is found."""
    fake = fakes.make_fake_engine(num_blocks=4)
    chain = list(range(1, 13))
    fake.add(chain, max_tokens=1)
    fake.finish()
    fake.add(list(range(50, 57)), max_tokens=1)
    fake.finish()
    fake.add([*chain, 99], max_tokens=1)
    fake.step()
    assert fake.cached["r2"] == 8
    fake.finish()
    fake.add(list(range(60, 75)), max_tokens=1)
    fake.finish()
    again = fake.add(chain, max_tokens=1)
    fake.finish()
    assert fake.cached[again] == 0


@CACHES
def test_a_prefix_that_another_request_holds_costs_nothing(cache: str) -> None:
    """4.12, the variant: the six blocks of the prefix are in use, three more are really free: admitted at once."""
    fake = fakes.make_fake_engine(num_blocks=10, prefix_cache=cache)
    prefix = list(range(1, 25))
    fake.add([*prefix, 70], max_tokens=4)
    fake.step()
    late = fake.add([*prefix, *range(100, 109)], max_tokens=1)
    fake.step()
    assert fake.frames[-1].load.preemptions == 0
    assert fake.cached[late] == 24 and late in fake.last


@CACHES
def test_equal_hashes_never_give_foreign_kv(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """4.18: every chunk has the same hash; prompts that differ early, late or in length still get their own answers."""
    same = ChunkHash(bytes(16))
    monkeypatch.setattr(chunk_hash_cache, "hash_chunk", lambda parent, tokens: same)
    monkeypatch.setattr(block_table, "hash_prompt", lambda parent, tokens, size: [same] * (len(tokens) // size))
    fake = fakes.make_fake_engine(num_blocks=40, prefix_cache=cache)
    base = list(range(1, 33))
    prompts = [base, [99, *base[1:]], [*base[:16], *base[:16]], base[16:], base[:16] + [7] * 8, [*base, 5], base]
    for _ in range(3):
        ids = [fake.add(prompt, max_tokens=9) for prompt in prompts]
        fake.finish()
        for prompt, request in zip(prompts, ids, strict=True):
            assert fake.answers[request] == fakes.expected_answer(prompt, 9)
    assert fake.cached[ids[-1]] > 0


def test_a_salt_that_equals_an_adapter_is_no_adapter() -> None:
    """4.19 and 4.20: salt "x" and adapter "x" share neither KV nor chunk hashes."""
    pool = BlockPool(16)
    tree = RadixTree(pool, 4, chunk_blocks=2)
    plain = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=8)
    tuned = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=8, adapter="x")
    chunks = []
    for name, scheme, salt in (("adapter", tuned, ""), ("salt", plain, "x")):
        manager = BlockManager(pool, tree, 4, scheme)
        assert manager.allocate(name, range(16), salt) == 0
        manager.commit(name, range(16), 16)
        chunks += [chunk for event in manager.take_events() for chunk in event.chunk_hashes]
    assert len(set(chunks)) == len(chunks) == 4


@CACHES
def test_no_token_comes_after_the_end(cache: str) -> None:
    """4.24: a cancelled request's blocks go to the next one in the same step; neither gets the other's tokens."""
    fake = fakes.make_fake_engine(num_blocks=6, prefix_cache=cache)
    gone = fake.add(list(range(1, 20)), max_tokens=5)
    for _ in range(3):
        fake.step()
    fake.cancel(gone)
    late = fake.add(list(range(50, 69)), max_tokens=5)
    fake.finish()  # FakeEngine refuses any delta of a request that ended
    assert fake.last[gone].finish_reason is FinishReason.CANCELLED
    assert fake.answers[gone] == fakes.expected_answer(list(range(1, 20)), 3)
    assert fake.answers[late] == fakes.expected_answer(list(range(50, 69)), 5)


@CACHES
def test_beams_take_no_more_blocks_than_their_own_suffixes(cache: str) -> None:
    """4.26: at most the prompt's blocks and, for each beam, its suffix and one copy; afterwards all are back."""
    fake = fakes.make_fake_engine(num_blocks=40, prefix_cache=cache)
    fake.add(PROMPT, max_tokens=10, beam_width=4)
    while fake.engine.has_work:
        load = fake.step().load
        assert load.in_use_blocks <= 4 + 4 * (3 + 1)
    assert fake.frames[-1].load.in_use_blocks == 0


@CACHES
def test_events_say_cached_until_the_last_copy_goes(cache: str) -> None:
    """4.28: two rows compute the same chunks: stored once, removed once, at eviction; a reset says cleared once."""
    world = kv_world.KvWorld(cache, num_blocks=8)
    a, b = admitted(world, range(16), compute=False), admitted(world, range(16), compute=False)
    world.step({a.name: 16, b.name: 16})
    world.free(a)
    assert (world.stats["stored"], world.stats["removed"]) == (2, 0)
    world.free(b)
    world.free(admitted(world, range(100, 132), compute=False))
    world.reset()
    assert [world.stats[kind] for kind in ("stored", "removed", "cleared")] == [2, 2, 1]


@CACHES
def test_disjoint_chats_in_a_tiny_pool(cache: str) -> None:
    """4.29, without a host tier: two chats push each other out of the cache turn by turn and never mix."""
    fake = fakes.make_fake_engine(num_blocks=12, prefix_cache=cache)
    chats = {100: [101], 500: [501]}
    for turn in range(4):
        for first, history in chats.items():
            history += range(first + 10 * turn, first + 10 * turn + 4)
            request = fake.add(history, max_tokens=3)
            fake.finish()
            assert fake.answers[request] == fakes.expected_answer(history, 3)
            history += fake.answers[request]
