"""assemble_engine: an engine around any runner: pool, tree, manager and scheduler wired together.

Owns: the wiring inside one engine.
Does not: load models (engine_factory) or import torch, so that tests assemble engines too.
Invariants: block count, block size and model length come from the runner's facts, so all parts agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.config import CacheConfig, EngineConfig
from cluster.core.hashing import ChunkHash, RouteScheme, root_hash
from worker.engine import Engine
from worker.grammar_port import GrammarPort
from worker.group_stops import Decode
from worker.kvcache.block_journal import BlockJournal, log_entry
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.chunk_hash_cache import ChunkHashCache
from worker.kvcache.prefix_cache import CacheNamespace, PrefixCache
from worker.kvcache.radix_tree import RadixTree
from worker.request_gate import SchedulerLimits
from worker.runner import ModelFacts, Runner
from worker.scheduler import Scheduler


def assemble_engine(
    config: EngineConfig,
    runner: Runner,
    scheme: RouteScheme,
    decode: Decode | None = None,
    grammars: GrammarPort | None = None,
    clock: Callable[[], float] = time.monotonic,
    manager: BlockManager | None = None,
) -> Engine:
    """`decode`: tokens to text; without it stop strings do not end rows of groups in the engine.

    `grammars`: without it requests with a constraint are refused. `clock`: seconds, monotonic. `manager`: one that was
    made for this runner, where `build_manager`'s is not the one that is wanted.
    """
    facts, cache = runner.facts, config.cache
    if manager is None:
        manager = build_manager(cache, facts, scheme, BlockJournal(log_entry) if config.log_blocks else None)
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        token_budget=config.token_budget,
        max_queue=config.max_queue,
        max_queue_tokens=config.max_queue_tokens,
        prefix_first=config.scheduling == "prefix" and cache.prefix_cache != "off",
        ageing_s=config.ageing_s,
        hold_back=config.hold_back,
        watermark=config.watermark,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        strict_blocks=config.strict_blocks,
    )
    scheduler = Scheduler(manager, limits, clock, decode)
    return Engine(runner, manager, scheduler, clock, config.check_invariants, grammars)


def build_manager(
    config: CacheConfig, facts: ModelFacts, scheme: RouteScheme, journal: BlockJournal | None = None
) -> BlockManager:
    pool = BlockPool(facts.num_blocks)
    cache = prefix_cache(config, pool, scheme)
    return BlockManager(pool, cache, facts.block_size, scheme, facts.kv_fingerprint, journal=journal)


def prefix_cache(config: CacheConfig, pool: BlockPool, scheme: RouteScheme) -> PrefixCache | None:
    chunk_blocks = config.chunk_tokens // config.block_size

    def root_of(namespace: CacheNamespace) -> ChunkHash:
        return root_hash(scheme.with_salt(namespace.salt))

    match config.prefix_cache:
        case "radix":
            return RadixTree(pool, config.block_size, chunk_blocks, partial=config.partial_reuse)
        case "chunk":
            return ChunkHashCache(pool, config.block_size, chunk_blocks, root_of)
        case "off":
            return None
