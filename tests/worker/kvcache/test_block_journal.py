"""BlockJournal: what the manager reports, numbers that can be replayed, and the comparison of two runs."""

from __future__ import annotations

import logging
import random

import pytest

from cluster.core.hashing import RouteScheme
from worker.kvcache.block_journal import BlockAction, BlockEntry, BlockJournal, canonical, diff, log_entry
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.radix_tree import RadixTree

B = 4
SCHEME = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=2 * B)


class Recorded:
    """A manager that keeps its journal."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.entries: list[BlockEntry] = []
        self.pool = BlockPool(num_blocks)
        tree = RadixTree(self.pool, B, chunk_blocks=2)
        journal = BlockJournal(self.entries.append)
        self.manager = BlockManager(self.pool, tree, B, SCHEME, journal=journal)

    def prefill(self, name: str, tokens: list[int]) -> bool:
        if self.manager.allocate(name, tokens) is None:
            return False
        self.manager.take_copies()
        self.manager.commit(name, tokens, len(tokens), tail=True)
        return True

    def news(self) -> list[str]:
        """What happened since the last call, without the step."""
        lines = [str(entry).split(" ", 1)[1] for entry in self.entries]
        self.entries.clear()
        return lines


def test_a_life_of_blocks_line_by_line() -> None:
    run = Recorded()
    tokens = list(range(10))
    run.prefill("a", tokens)
    assert run.news() == [
        "allocate seq=a block=0 refs=1 free=7",
        "allocate seq=a block=1 refs=1 free=6",
        "allocate seq=a block=2 refs=1 free=5",
    ]
    run.prefill("b", [*tokens[:6], 77])
    assert run.news() == [
        "share seq=b block=0 refs=2 free=5",
        "allocate seq=b block=3 refs=1 free=4",
        "copy seq=b block=3 from=1 refs=1 free=4",
    ]
    run.manager.fork("a", "c", 9)
    assert run.manager.append_token("c", 10)
    assert run.news() == [
        "share seq=c block=0 refs=3 free=4",
        "share seq=c block=1 refs=2 free=4",
        "share seq=c block=2 refs=2 free=4",
        "allocate seq=c block=4 refs=1 free=3",
        "copy seq=c block=4 from=2 refs=1 free=3",
        "free seq=c block=2 refs=1 free=3",
    ]
    run.manager.reset_cache()
    assert run.news() == []
    run.manager.free("c")
    assert run.news() == [
        "free seq=c block=4 refs=0 free=4",
        "free seq=c block=1 refs=1 free=4",
        "free seq=c block=0 refs=2 free=4",
    ]


def test_an_eviction_names_the_sequence_that_needed_the_memory() -> None:
    run = Recorded(num_blocks=4)
    run.prefill("a", list(range(12)))
    run.manager.free("a")
    run.news()
    run.prefill("b", list(range(50, 58)))
    assert run.news() == [
        "evict seq=b block=2 refs=0 free=2",
        "allocate seq=b block=2 refs=1 free=1",
        "allocate seq=b block=3 refs=1 free=0",
    ]
    run.manager.reset_cache()
    assert run.news() == ["evict seq=- block=0 refs=0 free=1", "evict seq=- block=1 refs=0 free=2"]


def test_a_duplicate_is_shared_before_it_is_given_back() -> None:
    run = Recorded()
    tokens = list(range(4))
    assert run.manager.allocate("a", tokens) == run.manager.allocate("b", tokens) == 0
    run.manager.commit("a", tokens, 4)
    run.news()
    run.manager.commit("b", tokens, 4)
    assert run.news() == ["share seq=b block=0 refs=2 free=6", "free seq=b block=1 refs=0 free=7"]


def test_pins_have_a_name_of_their_own() -> None:
    run = Recorded()
    run.prefill("a", list(range(8)))
    run.manager.free("a")
    run.news()
    run.manager.pin("system", list(range(4)), until_s=1.0)
    run.manager.unpin("system")
    assert run.news() == ["share seq=pin:system block=0 refs=1 free=6", "free seq=pin:system block=0 refs=0 free=6"]


def test_a_refusal_leaves_no_entry() -> None:
    run = Recorded(num_blocks=3)
    run.prefill("a", list(range(10)))
    run.manager.fork("a", "b")
    run.news()
    assert run.manager.allocate("c", [*range(6), *range(50, 60)]) is None
    assert not run.manager.append_token("b", 11)
    assert run.news() == []


def test_without_a_journal_the_pool_remembers_no_evictions() -> None:
    pool = BlockPool(2)
    manager = BlockManager(pool, RadixTree(pool, B, chunk_blocks=2), B, SCHEME)
    for name in "abc":
        manager.allocate(name, [ord(name)] * 8)
        manager.commit(name, [ord(name)] * 8, 8)
        manager.free(name)
    with pytest.raises(AssertionError, match="nobody watches"):
        pool.take_evicted()


def live_a_random_life(run: Recorded, rng: random.Random) -> None:
    live: dict[str, list[int]] = {}
    for number in range(200):
        name = f"r{number}"
        tokens = [*range(rng.randrange(12)), *(rng.randrange(100, 103) for _ in range(rng.randrange(1, 12)))]
        if run.prefill(name, tokens):
            live[name] = tokens
        if live and rng.random() < 0.4:
            parent = rng.choice(list(live))
            at = rng.randrange(1, len(live[parent]) + 1)
            run.manager.fork(parent, name + "f", at)
            live[name + "f"] = live[parent][:at]
        for row, tokens in live.items():
            if run.manager.append_token(row, len(tokens) + 1):
                tokens.append(rng.randrange(100, 103))
                run.manager.commit(row, tokens, len(tokens))
        while len(live) > 3:
            gone = rng.choice(list(live))
            run.manager.free(gone)
            del live[gone]
        if rng.random() < 0.02:
            run.manager.reset_cache()
        run.manager.check_invariants()
        run.manager.end_step()


@pytest.mark.parametrize("seed", range(8))
def test_replaying_the_entries_gives_the_pool(seed: int) -> None:
    """Every ref count and every free count of a random life is what the entries before it add up to."""
    run = Recorded(num_blocks=20)
    live_a_random_life(run, random.Random(seed))
    refs, free = [0] * 20, 20
    for entry in run.entries:
        before = refs[entry.block]
        match entry.action:
            case BlockAction.ALLOCATE:
                refs[entry.block], free = 1, free - 1
                assert before == 0
            case BlockAction.SHARE:
                refs[entry.block] += 1
            case BlockAction.FREE:
                refs[entry.block] -= 1
                assert entry.free - free in ((0, 1) if before == 1 else (0,))  # the cache may have kept it
                free = entry.free
            case BlockAction.EVICT:
                free += 1
                assert before == 0
        assert (entry.refs, entry.free) == (refs[entry.block], free), entry
    assert refs == [run.pool.ref_count(block) for block in range(20)]
    assert free == run.pool.num_free
    assert {entry.action for entry in run.entries} == set(BlockAction)
    assert [entry.step for entry in run.entries] == sorted(entry.step for entry in run.entries)
    assert run.entries[-1].step > 150


def entry(block: int, action: BlockAction = BlockAction.ALLOCATE, source: int | None = None) -> BlockEntry:
    return BlockEntry(step=1, action=action, seq_id="r", block=block, refs=1, free=0, source=source)


def test_canonical_numbers_are_those_of_the_first_appearance() -> None:
    entries = [entry(7), entry(3), entry(9, BlockAction.COPY, source=7), entry(3)]
    assert [(e.block, e.source) for e in canonical(entries)] == [(0, None), (1, None), (2, 0), (1, None)]
    assert canonical(canonical(entries)) == canonical(entries)


def test_journals_that_differ_in_block_numbers_only_are_equal() -> None:
    assert diff([entry(7), entry(3), entry(7)], [entry(0), entry(5), entry(0)]) is None
    assert diff([], []) is None


def test_the_first_difference_comes_with_what_was_before_it() -> None:
    same = [entry(block) for block in (9, 8, 7, 6)]
    found = diff([*same, entry(9), entry(1)], [*same, entry(8), entry(1)])
    assert found is not None
    assert (found.agreed, len(found.before)) == (4, 3)
    assert str(found).splitlines() == [
        "first difference at entry 5",
        *(f"    step=1 allocate seq=r block={n} refs=1 free=0" for n in (1, 2, 3)),
        "  a step=1 allocate seq=r block=0 refs=1 free=0",
        "  b step=1 allocate seq=r block=1 refs=1 free=0",
    ]


def test_a_journal_that_ends_early_differs_where_it_ends() -> None:
    found = diff([entry(1)], [entry(1), entry(2)])
    assert found is not None and found.a is None
    assert "a (ends here)" in str(found) and "b step=1" in str(found)


def test_a_logged_entry_is_one_line_at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worker.kvcache.block_journal")
    log_entry(BlockEntry(step=12, action=BlockAction.ALLOCATE, seq_id="r1", block=7, refs=1, free=40))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "block step=12 allocate seq=r1 block=7 refs=1 free=40")
    ]
