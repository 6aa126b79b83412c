"""Long seeded lives of KV memory: the rules of the state machine, weighted as in a busy engine, for thousands of steps.

KVRAY_LONG=1 (`make test-long`) is the long form; it prints what happened under each seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import kv_rules
import pytest

LONG = bool(os.environ.get("KVRAY_LONG"))
STEPS, SEEDS = (10_000, 20) if LONG else (300, 3)
TOLD = ("admits", "forks", "preemptions", "pins", "evictions", "copies", "tokens", "hits")


def drive(cache: str, seed: int, steps: int) -> Counter[str]:
    rng = random.Random(seed)
    life = kv_rules.KvLife(cache, num_blocks=16 + 4 * (seed % 3))
    names, weights = list(kv_rules.RULES), [rule.weight for rule in kv_rules.RULES.values()]
    for step, name in enumerate(rng.choices(names, weights, k=steps)):
        rule = kv_rules.RULES[name]
        if rule.possible(life):
            try:
                rule.act(life, rng.randint)
            except AssertionError as error:
                error.add_note(f"{name}, step {step} of seed {seed} on the cache {cache!r}")
                raise
    kv_rules.drain(life)
    return life.world.stats


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("cache", ["radix", "chunk"])
def test_a_long_life_keeps_every_promise(cache: str, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    stats = drive(cache, seed, STEPS)
    if LONG:
        told = ", ".join(f"{stats[name]} {name}" for name in TOLD)
        with capsys.disabled():
            print(f"\n{cache} seed {seed}: {STEPS} steps, {told}", end=" ")
    rare = () if LONG else ("pins", "hits")
    assert all(stats[name] for name in TOLD if name not in rare), f"the drive is too tame: {stats}"


@pytest.mark.parametrize("cache", ["whole", "off"])
def test_a_long_life_without_partial_reuse_and_without_a_cache(cache: str) -> None:
    stats = drive(cache, seed=0, steps=STEPS)
    assert all(stats[name] for name in ("admits", "forks", "preemptions", "copies", "tokens"))
    assert bool(stats["hits"]) == (cache == "whole")
