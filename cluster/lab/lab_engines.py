"""Engines for experiments: one loaded model under many of them, or none at all where only counts matter.

Owns: loading the model once, and the wiring of one engine after the other over its pool.
Does not: run requests (driven_engine).
Invariants: an engine is assembled by the same function as a served one; engines that share a model run one at a time,
each with books of its own, so what another one left in the pool is never found.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from cluster.config import CacheConfig, EngineConfig
from cluster.core.hashing import RouteScheme
from cluster.lab.driven_engine import DrivenEngine
from cluster.lab.findings import LabContext
from cluster.model_shape import read_shape
from cluster.simulate.step_times import EXAMPLE
from cluster.simulate.virtual_clock import VirtualClock
from cluster.simulate.virtual_runner import VirtualRunner, virtual_facts
from worker.engine_assembly import assemble_engine, build_manager
from worker.kvcache.block_manager import BlockManager
from worker.runner import ModelFacts, Runner

MakeManager = Callable[[CacheConfig, ModelFacts, RouteScheme], BlockManager]
BLOCK_SIZE = 16
_WIDEST_ITEM = 4  # bytes of a number in the pool, at most


class ModelEngines:
    """The real model, loaded once. `tokens`: what the pool holds, at least."""

    def __init__(self, context: LabContext, tokens: int, block_size: int = BLOCK_SIZE) -> None:
        from worker.model_runner import ModelRunner  # imports torch

        self.threads = context.threads or available_cores()
        self._block_size = block_size
        shape = read_shape(json.loads((context.model_dir / "config.json").read_text(encoding="utf-8")))
        per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * _WIDEST_ITEM
        cache = CacheConfig(
            block_size=block_size,
            chunk_tokens=4 * block_size,
            kv_memory=-(-tokens // block_size) * block_size * per_token,
        )
        config = EngineConfig(
            model=str(context.model_dir),
            threads=self.threads,
            cache=cache,
            max_model_len=min(tokens, shape.model_limit),
        )
        self.runner = ModelRunner(config, context.model_dir)

    @property
    def facts(self) -> ModelFacts:
        return self.runner.facts

    @property
    def pool_bytes(self) -> int:
        """Of the pool's tensor."""
        return self.runner.pool.tensor.nbytes

    def engine(self, make_manager: MakeManager = build_manager, **options: Any) -> DrivenEngine:
        return _engine(self.runner, make_manager, self._block_size, options)


def counting_engine(
    num_blocks: int, make_manager: MakeManager = build_manager, block_size: int = BLOCK_SIZE, **options: Any
) -> DrivenEngine:
    """An engine around a model that computes nothing: who computes and holds what does not depend on the numbers.

    Its seconds are virtual ones of an example model, and no measurement.
    """
    clock = VirtualClock()
    runner = VirtualRunner(virtual_facts(num_blocks, block_size), EXAMPLE, clock, lambda _: None)
    return _engine(runner, make_manager, block_size, options, clock)


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _engine(
    runner: Runner,
    make_manager: MakeManager,
    block_size: int,
    options: dict[str, Any],
    clock: Callable[[], float] = time.monotonic,
) -> DrivenEngine:
    """`options`: fields of EngineConfig and of CacheConfig, by name."""
    of_cache = {name: options.pop(name) for name in list(options) if name in CacheConfig.model_fields}
    cache = CacheConfig(**{"block_size": block_size, "chunk_tokens": 4 * block_size, **of_cache})
    config = EngineConfig(model="lab", cache=cache, **options)
    scheme = RouteScheme(tokenizer_revision="lab", model_revision="lab", chunk_tokens=cache.chunk_tokens)
    manager = make_manager(cache, runner.facts, scheme)
    return DrivenEngine(assemble_engine(config, runner, scheme, manager=manager, clock=clock))
