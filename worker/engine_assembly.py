"""assemble_engine: an engine around any runner: pool, tree, manager and scheduler wired together.

Owns: the wiring inside one engine.
Does not: load models (engine_factory) or import torch, so that tests and the simulator assemble engines too.
Invariants: block count, block size and model length come from the runner's facts, so all parts agree.
"""

from __future__ import annotations

import time

from cluster.config import CacheConfig, EngineConfig
from cluster.core.hashing import RouteScheme
from worker.engine import Engine
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.prefix_cache import PrefixCache
from worker.kvcache.radix_tree import RadixTree
from worker.runner import Runner
from worker.scheduler import Scheduler, SchedulerLimits


def assemble_engine(config: EngineConfig, runner: Runner, scheme: RouteScheme) -> Engine:
    facts, cache = runner.facts, config.cache
    pool = BlockPool(facts.num_blocks)
    manager = BlockManager(pool, _prefix_cache(cache, pool), facts.block_size, scheme, facts.kv_fingerprint)
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        token_budget=config.token_budget,
        max_queue=config.max_queue,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        strict_blocks=config.strict_blocks,
    )
    return Engine(runner, manager, Scheduler(manager, limits), time.monotonic, config.check_invariants)


def _prefix_cache(config: CacheConfig, pool: BlockPool) -> PrefixCache | None:
    if config.prefix_cache == "off":
        return None
    return RadixTree(pool, config.block_size, config.chunk_tokens // config.block_size, partial=config.partial_reuse)
