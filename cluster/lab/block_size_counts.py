"""What a block size costs without a model: unused slots, hits lost, and the books (article 2.2).

    waste       slots of the last block that hold nothing, over requests of mixed lengths
    lost        hits in chats that would be lost if only whole blocks were reused
    metadata    bytes of the pool's books and of the block tables, and the time to keep them, per token

Owns: these counts, on the production BlockManager.
Does not: compute attention (block_sizes).
Invariants: waste and hits are exact; bytes are what Python's allocator gave out.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import NamedTuple

from cluster.core.hashing import RouteScheme
from cluster.lab.lab_engines import counting_engine
from cluster.lab.prefix_keyings import RADIX, Keying, Reuse, run_set
from cluster.lab.prefix_matrix import VOCABULARY, WHOLE_BLOCKS
from cluster.lab.prompt_sets import PromptSet, TokenSource, prompt_sets
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.radix_tree import RadixTree

POOL_TOKENS = 65_536
REQUESTS = 48
LONGEST = 1_200


class BlockCosts(NamedTuple):
    """used, reserved: slots.  metadata_bytes: per token of the pool.  book_us: microseconds a token."""

    used: int
    reserved: int
    hits_whole: int
    hits_exact: int
    prompt_tokens: int
    metadata_bytes: float
    book_us: float

    @property
    def waste(self) -> float:
        return 1 - self.used / self.reserved

    @property
    def lost(self) -> float:
        """Share of the chats' prompt tokens that whole blocks do not find."""
        return (self.hits_exact - self.hits_whole) / self.prompt_tokens


def lengths(seed: int) -> list[int]:
    """Of mixed requests: many short ones, some long."""
    rng = random.Random(seed)
    return [min(LONGEST, 20 + int(rng.expovariate(1 / 250))) for _ in range(REQUESTS)]


def block_costs(block_size: int, seed: int) -> BlockCosts:
    used, reserved, metadata, seconds = _held(block_size, seed)
    (chat,) = [one for one in prompt_sets(TokenSource(seed, VOCABULARY)) if one.name == "chat"]
    whole, exact = (_reuse(chat, block_size, keying) for keying in (WHOLE_BLOCKS, RADIX))
    assert exact.hits == exact.counted_hits >= whole.hits, f"block size {block_size}: {exact}"
    per_token = metadata / POOL_TOKENS
    return BlockCosts(used, reserved, whole.hits, exact.hits, exact.prompt_tokens, per_token, 1e6 * seconds / used)


def _held(block_size: int, seed: int) -> tuple[int, int, int, float]:
    """Tokens, slots, bytes of books and seconds of bookkeeping for all requests at once."""
    source = TokenSource(seed, VOCABULARY)
    requests = [list(source.take(length)) for length in lengths(seed)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        manager = _manager(block_size)
        for number, tokens in enumerate(requests):
            assert manager.allocate(f"r{number}", tokens) is not None
        metadata = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    counts = manager.counts()
    timed = _manager(block_size)
    started = time.thread_time()
    for number, tokens in enumerate(requests):
        timed.allocate(f"r{number}", tokens)
        timed.commit(f"r{number}", tokens, len(tokens), tail=True)
    for number in range(len(requests)):
        timed.free(f"r{number}")
    seconds = time.thread_time() - started
    return sum(len(tokens) for tokens in requests), counts.in_use * block_size, metadata, seconds


def _reuse(chat: PromptSet, block_size: int, keying: Keying) -> Reuse:
    engine = counting_engine(POOL_TOKENS // block_size, block_size=block_size, **keying.options)
    return run_set(chat, keying, engine)


def _manager(block_size: int) -> BlockManager:
    pool = BlockPool(POOL_TOKENS // block_size)
    scheme = RouteScheme(tokenizer_revision="lab", model_revision="lab", chunk_tokens=4 * block_size)
    return BlockManager(pool, RadixTree(pool, block_size, chunk_blocks=4), block_size, scheme)
