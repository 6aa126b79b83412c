"""How many blocks a replica gets, and the account of its KV memory in words.

Owns: the arithmetic from bytes to blocks, the check that one longest request fits, and the texts about both.
Does not: measure memory, allocate, or import torch; the caller passes numbers in.
Invariants: a returned plan holds at least one request of `max_model_len` tokens; a length the user asked for is
never shortened silently: it fits or ConfigError says what is missing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from cluster.core.byte_size import format_bytes
from cluster.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRequest:
    """What the plan is made from.

    kv_memory: a budget in bytes, or None for `memory_share` of `free_bytes` (what is free after the weights).
    model_limit: the longest sequence the model itself allows.
    max_model_len: the length the user asked for, or None.
    """

    bytes_per_token: int
    block_size: int
    free_bytes: int
    kv_memory: int | None
    memory_share: float
    model_limit: int
    max_model_len: int | None

    @property
    def budget_bytes(self) -> int:
        return int(self.free_bytes * self.memory_share) if self.kv_memory is None else self.kv_memory

    @property
    def budget_text(self) -> str:
        if self.kv_memory is not None:
            return f"kv_memory is {format_bytes(self.kv_memory)}"
        share = f"{self.memory_share:.0%} of {format_bytes(self.free_bytes)} free memory"
        return f"{share} is {format_bytes(self.budget_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """The answer. `warning` is a sentence for the log when the length was shortened to what fits."""

    num_blocks: int
    block_size: int
    max_model_len: int
    bytes_per_token: int
    warning: str | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.bytes_per_token

    @property
    def full_length_requests(self) -> int:
        return self.num_blocks // _blocks(self.max_model_len, self.block_size)


def plan_kv(request: KvRequest) -> KvPlan:
    """The number of blocks and the longest request. ConfigError when not even the wanted length (or one block) fits."""
    wanted = request.max_model_len or request.model_limit
    if wanted > request.model_limit:
        raise ConfigError(f"max_model_len {wanted} is over the model's own limit of {request.model_limit} tokens")
    if request.kv_memory is not None and request.kv_memory > request.free_bytes:
        raise ConfigError(f"{request.budget_text}, but only {format_bytes(request.free_bytes)} are free")
    bytes_per_block = request.bytes_per_token * request.block_size
    num_blocks = request.budget_bytes // bytes_per_block
    fits = num_blocks * request.block_size
    if num_blocks == 0:
        raise ConfigError(f"{request.budget_text}, less than one block of KV ({format_bytes(bytes_per_block)})")
    warning = None
    if wanted > fits:
        needed = format_bytes(_blocks(wanted, request.block_size) * bytes_per_block)
        facts = f"one request of {wanted} tokens needs {needed} of KV memory, but {request.budget_text}"
        if request.max_model_len is not None:
            raise ConfigError(f"{facts}; the longest that fits is --max-model-len {fits}")
        warning = f"{facts}; max_model_len is lowered to {fits}"
    return KvPlan(
        num_blocks=num_blocks,
        block_size=request.block_size,
        max_model_len=min(wanted, fits),
        bytes_per_token=request.bytes_per_token,
        warning=warning,
    )


def account_text(plan: KvPlan, *, weight_bytes: int, weights_dtype: str) -> str:
    """The block of lines logged once at start."""
    rows = (
        ("weights", f"{format_bytes(weight_bytes)} ({weights_dtype})"),
        ("KV per token", f"{plan.bytes_per_token:,} bytes"),
        ("KV pool", f"{format_bytes(plan.num_bytes)}: {plan.num_blocks:,} blocks of {plan.block_size} tokens"),
        ("KV tokens", f"{plan.num_tokens:,}"),
        ("longest request", f"{plan.max_model_len:,} tokens"),
        ("at full length", f"{plan.full_length_requests:,} requests at once"),
    )
    return "\n".join(f"  {name:<16} {value}" for name, value in rows)


def available_memory(meminfo: str) -> int:
    """Bytes that can be used without swapping, from the text of /proc/meminfo."""
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise ConfigError("cannot tell how much memory is free: /proc/meminfo has no MemAvailable; set --kv-memory")


def container_memory(limit: str, current: str, stat: str) -> int:
    """Bytes left under a cgroup v2 limit, from memory.max, .current and .stat; inactive page cache counts as free."""
    if limit.strip() == "max":
        return sys.maxsize
    fields = dict(line.split() for line in stat.splitlines())
    return max(0, int(limit) - int(current) + int(fields.get("inactive_file", 0)))


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
