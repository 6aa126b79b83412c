"""KV cache bookkeeping, measured: operations per second by cache size, bytes per block, and the cost of a step.

    .venv/bin/python -m benchmarks.bench_kvcache            everything (four minutes, 300 MB of memory)
    .venv/bin/python -m benchmarks.bench_kvcache --quick    small sizes, for a look

Two shapes of content. `groups`: eight sequences of 64 blocks share their first 32, the next eight share 32 others,
and so on. `wide`: 100,000 sequences share one chunk and go on with one chunk of their own: one node with 100,000
children.

An operation is one call. match: a cached sequence is found. insert: a sequence enters of which the first half (in
`wide`: the first chunk) is there already. evict: as many blocks as insert added are freed. fork: a sequence is shared.
What surrounds a call (taking blocks, letting go) is not timed.

Times are CPU time of the thread, in ten stretches, of which the one with the lowest median is reported: the machine may
have other work. Bytes are what tracemalloc counts for a full cache and its pool, divided by the cached blocks.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.quiet_clock import Stopwatch, python_call_ns
from cluster.core.hashing import RouteScheme, hash_prompt, root_hash
from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from cluster.garbage_collection import calm_garbage_collector
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.chunk_hash_cache import ChunkHashCache
from worker.kvcache.prefix_cache import CacheNamespace, PrefixCache
from worker.kvcache.radix_tree import RadixTree
from worker.request_gate import SchedulerLimits
from worker.runner import Sampled
from worker.scheduler import Scheduler

BLOCK = 16
CHUNK_BLOCKS = 4
SEQUENCE_BLOCKS = 64
GROUP = 8
VOCAB = 50_000
SCHEME = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=CHUNK_BLOCKS * BLOCK)
NAMESPACE = CacheNamespace("", "", "")
CACHES = ("radix", "chunk")


def make_cache(kind: str, pool: BlockPool) -> PrefixCache:
    if kind == "chunk":
        return ChunkHashCache(pool, BLOCK, CHUNK_BLOCKS, lambda _: root_hash(SCHEME))
    return RadixTree(pool, BLOCK, CHUNK_BLOCKS)


@dataclass(frozen=True)
class Shape:
    """Prompts of `blocks` blocks, `children` of them with the same first `shared` blocks."""

    blocks: int
    shared: int
    children: int

    @property
    def own(self) -> int:
        return self.blocks - self.shared

    def prompts(self, num_blocks: int, rng: random.Random) -> Iterator[list[int]]:
        """Prompts that together have at most `num_blocks` different blocks."""
        while num_blocks >= self.blocks:
            prefix = random_tokens(rng, self.shared)
            num_blocks -= self.shared
            for _ in range(min(self.children, num_blocks // self.own)):
                num_blocks -= self.own
                yield prefix + random_tokens(rng, self.own)


GROUPS = Shape(SEQUENCE_BLOCKS, SEQUENCE_BLOCKS // 2, GROUP)
WIDE = Shape(2 * CHUNK_BLOCKS, CHUNK_BLOCKS, 100_000)


def random_tokens(rng: random.Random, num_blocks: int) -> list[int]:
    return rng.choices(range(VOCAB), k=num_blocks * BLOCK)


class Filled:
    """A pool and a cache full of idle blocks, with room for one more sequence."""

    def __init__(self, kind: str, shape: Shape, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks + shape.blocks)
        self.cache = make_cache(kind, self.pool)
        self.shape = shape
        self.sample: list[list[int]] = []
        rng = random.Random(0)
        for number, prompt in enumerate(shape.prompts(num_blocks, rng)):
            self.live(prompt, lambda call: call())
            if number % 97 == 0 and len(self.sample) < 100:
                self.sample.append(prompt)
            self.cache.take_events()
        for prompt in self.sample:  # so that eviction takes the others first
            self.live(prompt, lambda call: call())

    def live(self, prompt: list[int], timed: Callable[[Callable[[], object]], object]) -> None:
        """A short life of a sequence; `timed` gets the call of insert."""
        hashes = hash_prompt(root_hash(SCHEME), prompt, SCHEME.chunk_tokens)
        blocks = self.cache.match(NAMESPACE, prompt).blocks
        self.pool.share(blocks)
        fresh = self.pool.allocate(len(prompt) // BLOCK - len(blocks))
        assert fresh is not None
        blocks += fresh
        timed(lambda: self.cache.insert(NAMESPACE, prompt, blocks, hashes))
        self.cache.on_idle(self.pool.release(reversed(blocks)))


def measure_operations(kind: str, shape: Shape, num_blocks: int, repeat: int) -> list[str]:
    filled = Filled(kind, shape, num_blocks)
    manager = BlockManager(filled.pool, filled.cache, BLOCK, SCHEME)
    rng = random.Random(1)
    match, insert, evict, fork = (Stopwatch() for _ in range(4))
    gc.collect()
    gc.freeze()
    gc.disable()
    for _ in range(repeat):
        prompt = rng.choice(filled.sample)
        match(lambda prompt=prompt: filled.cache.match(NAMESPACE, prompt))  # type: ignore[misc]
    for _ in range(repeat):
        prompt = rng.choice(filled.sample)
        new = prompt[: shape.shared * BLOCK] + random_tokens(rng, shape.own)
        filled.live(new, insert)
        evict(lambda: filled.cache.evict(shape.own))
    prompt = rng.choice(filled.sample)
    assert manager.allocate("parent", prompt) is not None
    manager.commit("parent", prompt, len(prompt))
    for _ in range(repeat):
        fork(lambda: manager.fork("parent", "child"))
        manager.free("child")
    gc.enable()
    gc.unfreeze()
    return [f"{1e6 / watch.microseconds().p50:,.0f}" for watch in (match, insert, evict, fork)]


def measure_bytes(kind: str, shape: Shape, num_blocks: int) -> float:
    gc.collect()
    tracemalloc.start()
    filled = Filled(kind, shape, num_blocks)
    filled.sample.clear()
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / filled.pool.counts().cached


def measure_step(kind: str, num_seqs: int, prompt_tokens: int, steps: int) -> float:
    """Microseconds of schedule + complete while `num_seqs` sequences decode, with nothing between the two."""
    token_budget = 8192
    longest = prompt_tokens + BLOCK + steps + num_seqs * prompt_tokens // token_budget + num_seqs
    pool = BlockPool(num_seqs * (longest // BLOCK + 1))
    manager = BlockManager(pool, make_cache(kind, pool), BLOCK, SCHEME)
    limits = SchedulerLimits(
        max_num_seqs=num_seqs,
        token_budget=token_budget,
        max_queue=num_seqs,
        max_model_len=longest,
        vocab_size=VOCAB,
        eos_token_ids=(),
    )
    scheduler, rng = Scheduler(manager, limits, time.monotonic), random.Random(0)
    for number in range(num_seqs):  # lengths differ, so that every step completes some blocks
        prompt = tuple(rng.choices(range(VOCAB), k=prompt_tokens + number % BLOCK))
        scheduler.add(GenerationRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=SamplingParams()))

    def step() -> bool:
        batch = scheduler.schedule()
        scheduler.complete(batch, [Sampled(7) for row in batch.seqs if row.sample])
        return len(batch.seqs) == num_seqs == sum(row.sample and len(row.token_ids) == 1 for row in batch.seqs)

    while not step():
        pass
    manager.take_events()
    watch = Stopwatch()
    calm_garbage_collector()  # as in the engine's process
    for _ in range(steps):
        watch(step)
    assert step() and scheduler.num_preemptions == 0
    return watch.microseconds().p50


def print_table(titles: list[str], rows: list[list[str]]) -> None:
    print(f"| {' | '.join(titles)} |")
    print(f"|{'|'.join('---' if n == 0 else '---:' for n in range(len(titles)))}|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions")
    quick = parser.parse_args().quick
    repeat, steps = (100, 2 * BLOCK) if quick else (1000, 20 * BLOCK)
    sizes = [1_000, 10_000] if quick else [1_000, 10_000, 100_000, 1_000_000]
    wide_blocks = WIDE.shared + WIDE.own * (1_000 if quick else WIDE.children)
    shapes = [("groups", GROUPS, size) for size in sizes] + [("wide", WIDE, wide_blocks)]

    print(f"A Python call takes {python_call_ns():.0f} ns.\n")
    print("Operations per second\n")
    rows = []
    for kind in CACHES:
        for name, shape, num_blocks in shapes:
            rows.append([kind, name, f"{num_blocks:,}", *measure_operations(kind, shape, num_blocks, repeat)])
    print_table(["cache", "shape", "cached blocks", "match", "insert", "evict", "fork"], rows)

    print("Bytes of bookkeeping per cached block\n")
    rows = []
    for kind in CACHES:
        for name, shape, num_blocks in (("groups", GROUPS, sizes[-2]), ("wide", WIDE, wide_blocks)):
            rows.append([kind, name, f"{num_blocks:,}", f"{measure_bytes(kind, shape, num_blocks):.0f}"])
    print_table(["cache", "shape", "cached blocks", "bytes per block"], rows)

    print("Schedule + complete, every sequence decoding, no model: microseconds per step\n")
    rows = []
    for kind in CACHES:
        for num_seqs in (64, 256):
            for prompt_tokens in (1_000, 4_000):
                per_step = measure_step(kind, num_seqs, prompt_tokens, steps)
                target = 150 + 4 * num_seqs
                rows.append([kind, str(num_seqs), f"{prompt_tokens:,}", f"{per_step:,.0f}", f"{target:,}"])
    print_table(["cache", "sequences", "tokens each", "µs per step", "target"], rows)
    print(f"At the end a Python call takes {python_call_ns():.0f} ns.")


if __name__ == "__main__":
    main()
