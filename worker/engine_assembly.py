"""assemble_engine: an engine around any runner: pool, tree, manager and scheduler wired together.

Owns: the wiring inside one engine.
Does not: load models (engine_factory) or import torch, so that tests and the simulator assemble engines too.
Invariants: block count, block size and model length come from the runner's facts, so all parts agree.
"""

from __future__ import annotations

import time

from cluster.config import EngineConfig
from cluster.core.hashing import RouteScheme
from worker.engine import Engine
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.radix_tree import RadixTree
from worker.runner import Runner
from worker.scheduler import Scheduler, SchedulerLimits


def assemble_engine(config: EngineConfig, runner: Runner, scheme: RouteScheme) -> Engine:
    facts, cache = runner.facts, config.cache
    pool = BlockPool(facts.num_blocks)
    tree = RadixTree(pool, facts.block_size, cache.chunk_tokens // facts.block_size)
    manager = BlockManager(pool, tree if cache.prefix_cache == "radix" else None, facts.block_size, scheme)
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        token_budget=config.token_budget,
        max_queue=config.max_queue,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
    )
    return Engine(runner, manager, Scheduler(manager, limits), time.monotonic, config.check_invariants)
