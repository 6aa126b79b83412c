"""MemoryPlan: what one replica of a model does with a given amount of memory, before anything is loaded.

    memory = weights + what is free;   KV pool = a share of what is free, or a budget;   the rest is for everything else

Contiguous reservation, which paging is compared with, gives each request room for the longest one at its start, so what
a shorter request leaves unused is lost to the others.

Owns: the arithmetic from a shape and the weights to blocks, requests at once, and what is missing when it does not fit.
Does not: read configs or files (cluster.model_shape, cluster.plan_command), or size the pool: worker.kv_sizing does,
with the same function that a replica calls when it starts.
Invariants: a plan holds at least one request of its `max_model_len`; otherwise ConfigError says what is missing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cluster.config import CacheConfig
from cluster.core.byte_size import format_bytes
from cluster.core.errors import ConfigError
from cluster.model_shape import ModelShape
from worker.kv_sizing import KvPlan, KvRequest, plan_kv

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
TYPICAL_TOKENS = (1024, 4096, 8192)
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    parameters: int
    dtype: str
    source: Literal["formula", "headers"]

    @property
    def item_size(self) -> int:
        return ITEM_SIZES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.parameters * self.item_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """Requests of `tokens` tokens that run at once, with paging and with room for the longest one reserved for each.

    `reserved_use` is the share of a reservation that such a request fills.
    """

    tokens: int
    paged: int
    contiguous: int
    reserved_use: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """`missing_bytes` is how much KV memory the wanted length needs beyond the budget; 0 when it fits."""

    shape: ModelShape
    weights: Weights
    memory_bytes: int
    request: KvRequest
    kv: KvPlan
    missing_bytes: int

    @property
    def left_bytes(self) -> int:
        """For activations, the process itself and whatever else is on the device."""
        return self.request.free_bytes - self.kv.num_bytes

    @property
    def shortfall(self) -> str:
        """`missing_bytes` in words, with what would be enough."""
        return _shortfall(self.missing_bytes, self.weights, self.request)

    @property
    def mha_bytes_per_token(self) -> int:
        """KV of a token if every attention head kept its own."""
        return self.kv.bytes_per_token * self.shape.num_heads // self.shape.num_kv_heads

    @property
    def concurrency(self) -> tuple[Concurrency, ...]:
        """At typical lengths below the longest, and at the longest."""
        longest = self.kv.max_model_len
        contiguous = self.kv.num_tokens // longest
        return tuple(
            Concurrency(
                tokens=tokens,
                paged=self.kv.num_blocks // _blocks(tokens, self.kv.block_size),
                contiguous=contiguous,
                reserved_use=tokens / longest,
            )
            for tokens in (*(typical for typical in TYPICAL_TOKENS if typical < longest), longest)
        )


def weights_dtype(asked: str, shape: ModelShape) -> str:
    """`asked`, where "auto" is the stored dtype."""
    dtype = shape.dtype or "float32" if asked == "auto" else asked
    if dtype not in ITEM_SIZES:
        raise ConfigError(f"the stored dtype {dtype!r:.40} cannot be served; choose --dtype {', '.join(ITEM_SIZES)}")
    return dtype


def plan_memory(
    shape: ModelShape, weights: Weights, cache: CacheConfig, *, memory_bytes: int, max_model_len: int | None
) -> MemoryPlan:
    """ConfigError when the weights, the wanted length or a single block does not fit, with what is missing."""
    request = KvRequest(
        bytes_per_token=kv_bytes_per_token(shape, weights.item_size),
        block_size=cache.block_size,
        free_bytes=max(0, memory_bytes - weights.num_bytes),
        kv_memory=cache.kv_memory,
        memory_share=cache.memory_share,
        model_limit=shape.model_limit,
        max_model_len=max_model_len,
    )
    if weights.num_bytes > memory_bytes:
        raise ConfigError(
            f"the weights need {format_bytes(weights.num_bytes)} in {weights.dtype}, but the memory is "
            f"{format_bytes(memory_bytes)}; {_shortfall(weights.num_bytes - memory_bytes, weights, request)}"
        )
    missing = _missing(request)
    try:
        kv = plan_kv(request)
    except ConfigError as error:
        if missing == 0:
            raise
        raise ConfigError(f"{error.message}; {_shortfall(missing, weights, request)}") from None
    return MemoryPlan(
        shape=shape, weights=weights, memory_bytes=memory_bytes, request=request, kv=kv, missing_bytes=missing
    )


def kv_bytes_per_token(shape: ModelShape, item_size: int) -> int:
    """A key and a value per layer and KV head."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * item_size


def _missing(request: KvRequest) -> int:
    """Bytes beyond what is there: for the budget itself, or for one request of the wanted length."""
    wanted = request.max_model_len or request.model_limit
    if wanted > request.model_limit:
        return 0  # no memory helps
    if request.kv_memory is not None and request.kv_memory > request.free_bytes:
        return request.kv_memory - request.free_bytes
    return max(0, _needed(request) - request.budget_bytes)


def _shortfall(missing: int, weights: Weights, request: KvRequest) -> str:
    """What is missing, and the --memory in whole MiB that holds the weights and one request of the wanted length."""
    text = f"{format_bytes(missing)} missing"
    if request.kv_memory is not None or (request.max_model_len or 0) > request.model_limit:
        return text
    # one byte more: budget_bytes rounds a floating-point product down
    enough = weights.num_bytes + math.ceil(_needed(request) / request.memory_share) + 1
    return f"{text}; --memory {-(-enough // _MIB)}MiB is enough for one request of full length"


def _needed(request: KvRequest) -> int:
    wanted = request.max_model_len or request.model_limit
    return _blocks(wanted, request.block_size) * request.block_size * request.bytes_per_token


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
