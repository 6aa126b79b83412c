"""`log_blocks` and `strict_blocks`, from the configuration to what they do in a running engine."""

from __future__ import annotations

import logging
import re

import fake_engine as fakes
import pytest

from cluster.config import CacheConfig, EngineConfig
from cluster.core.hashing import RouteScheme
from worker.engine_assembly import assemble_engine

B = 4
LOGGER = "worker.kvcache.block_journal"
PROMPT = list(range(1, 11))


def make(num_blocks: int = 32, *, strict: bool = False, log: bool = False) -> fakes.FakeEngine:
    cache = CacheConfig(block_size=B, chunk_tokens=2 * B)
    config = EngineConfig(cache=cache, strict_blocks=strict, log_blocks=log)
    runner = fakes.FingerprintRunner(num_blocks, B, num_blocks * B)
    scheme = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=2 * B)
    return fakes.FakeEngine(assemble_engine(config, runner, scheme), runner)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert all(r.levelno == logging.INFO for r in caplog.records if r.name == LOGGER)
    return [r.getMessage() for r in caplog.records if r.name == LOGGER]


def test_log_blocks_prints_every_block_with_its_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    fake = make(log=True)
    fake.add(PROMPT, max_tokens=4)
    fake.finish()
    assert lines(caplog) == [
        "block step=1 allocate seq=r0 block=0 refs=1 free=31",
        "block step=1 allocate seq=r0 block=1 refs=1 free=30",
        "block step=1 allocate seq=r0 block=2 refs=1 free=29",
        "block step=4 allocate seq=r0 block=3 refs=1 free=28",  # for the third new token, number 12
        "block step=4 free seq=r0 block=3 refs=0 free=28",  # one token of it is cached
        "block step=4 free seq=r0 block=2 refs=0 free=28",
        "block step=4 free seq=r0 block=1 refs=0 free=28",
        "block step=4 free seq=r0 block=0 refs=0 free=28",
    ]


def test_log_blocks_shows_sharing_copies_and_evictions(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    fake = make(num_blocks=8, log=True)
    for prompt in (PROMPT, [*PROMPT[:6], 90, 91], list(range(100, 125))):
        fake.add(prompt, max_tokens=2)
        fake.finish()
    actions = [re.match(r"block step=\d+ (\w+) seq=(r\d) ", line) for line in lines(caplog)]
    seen = {match.groups() for match in actions if match}
    assert {("share", "r1"), ("copy", "r1"), ("evict", "r2"), ("free", "r2")} <= seen
    assert None not in actions


def test_an_idle_engine_does_not_count_steps(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise two runs of the same requests would differ by how often the engine woke up."""
    caplog.set_level(logging.INFO, LOGGER)
    fake = make(log=True)
    for _ in range(5):
        fake.step()
    fake.add(PROMPT, max_tokens=1)
    fake.finish()
    assert {line.split()[1] for line in lines(caplog)} == {"step=1"}


def test_nothing_is_logged_without_the_switch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    fake = make()
    fake.add(PROMPT, max_tokens=4)
    fake.finish()
    assert lines(caplog) == []


def share_instead_of_taking(fake: fakes.FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug to be caught: a new sequence gets a block that another one is using, properly counted."""
    manager = fake.engine._manager
    pool = manager._pool
    taken = manager.get_block_ids("r0")[0]

    def allocate(count: int) -> list[int]:
        pool.share([taken] * count)
        return [taken] * count

    monkeypatch.setattr(pool, "allocate", allocate)


def test_strict_blocks_catches_a_broken_share_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = make(strict=True)
    fake.add(PROMPT, max_tokens=20)
    fake.step()
    share_instead_of_taking(fake, monkeypatch)
    fake.add([50, 51, 52], max_tokens=4)
    before = fake.runner.pages[0][:]
    with pytest.raises(AssertionError, match="sequence r1 writes position 0 into block 0, which has 2 holders"):
        fake.step()
    assert fake.runner.pages[0] == before, "it was written"
    fake.engine._manager.check_invariants()  # the books are in order: nothing else would have seen it


def test_without_strict_blocks_the_same_share_overwrites_foreign_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the switch is for: the test above would fail without the check."""
    fake = make(strict=False)
    fake.add(PROMPT, max_tokens=20)
    fake.step()
    share_instead_of_taking(fake, monkeypatch)
    fake.add([50, 51, 52], max_tokens=4)
    before = fake.runner.pages[0][:]
    fake.step()
    assert fake.runner.pages[0] != before
    with pytest.raises(AssertionError, match="foreign KV"):
        fake.step()
