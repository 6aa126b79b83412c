"""SimSettings: one simulated replica: its memory, its engine's limits and its step times.

Owns: defaults, and turning them into an EngineConfig.
Does not: read options (cluster.simulate_command).
Invariants: options of the engine that are wrong or unknown are a ConfigError that names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from cluster.config import CacheConfig, EngineConfig
from cluster.core.errors import ConfigError
from cluster.core.step_time import StepTimeModel
from cluster.simulate.step_times import EXAMPLE, EXAMPLE_KV_TOKENS

BLOCK_SIZE = 64  # larger than a replica's, because the simulator's time goes into blocks
_CHUNK_LIMIT = 65536  # nobody reads the events of a single replica: hash as rarely as possible
_QUEUE_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """`engine`: further fields of EngineConfig, by name.  `fast_forward` off: every step on its own."""

    block_size: int = BLOCK_SIZE
    num_blocks: int = EXAMPLE_KV_TOKENS // BLOCK_SIZE
    step_time: StepTimeModel = EXAMPLE
    engine: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    fast_forward: bool = True

    def engine_config(self) -> EngineConfig:
        block_size = self.block_size
        try:
            cache = CacheConfig(block_size=block_size, chunk_tokens=max(_CHUNK_LIMIT // block_size, 1) * block_size)
            return EngineConfig(**{"max_queue": _QUEUE_LIMIT, "model": "virtual", "cache": cache, **self.engine})
        except ValidationError as error:
            problem = error.errors()[0]
            raise ConfigError(f"{problem['loc'][-1]}: {problem['msg'].removeprefix('Value error, ')}") from None
