"""The configuration tree: one pydantic model per part, unknown keys rejected, every default in one place.

Owns: names, types, bounds and defaults of all options, and parsing of sizes ("2GiB").
Does not: read the environment or files by itself; `cluster.cli` builds it, processes receive narrow parts.
Invariants: a built config is valid; it survives `model_dump()` -> `model_validate()` unchanged.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from cluster.core.autoscaling_policy import ScalingParameters

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = _UNITS[_letter] = 1024**_power


def parse_bytes(value: object) -> int:
    """`2GiB`, `512MB`, `1.5g` or a plain number -> bytes. ValueError when it is none of these."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write for example 2GiB, 512MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].lower()])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]


STOP_MARGIN_S = 10.0


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CacheConfig(_Part):
    """KV memory of one replica. `kv_memory` None means a share of the free memory."""

    block_size: int = Field(16, ge=1, le=1024)
    chunk_tokens: int = Field(64, ge=1, le=65536, validate_default=True)
    kv_memory: Bytes | None = None
    memory_share: float = Field(0.25, gt=0.0, le=0.95)
    prefix_cache: Literal["radix", "chunk", "off"] = "radix"
    partial_reuse: bool = True

    @field_validator("chunk_tokens")
    @classmethod
    def _whole_blocks(cls, chunk_tokens: int, info: ValidationInfo) -> int:
        block_size = info.data.get("block_size", 1)  # absent when it is wrong itself
        if chunk_tokens % block_size:
            raise ValueError(f"chunk_tokens ({chunk_tokens}) must be a multiple of block_size ({block_size})")
        return chunk_tokens


class EngineConfig(_Part):
    """One engine: model, memory and the limits of a step."""

    model: str = "demo"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: Literal["auto", "cpu", "flash", "triton", "reference"] = "auto"
    cuda_graphs: bool = False
    max_model_len: int | None = Field(None, ge=1)
    max_num_seqs: int = Field(64, ge=1)
    token_budget: int = Field(2048, ge=1)
    max_queue: int = Field(1024, ge=1)
    max_queue_tokens: int | None = Field(None, ge=1)
    scheduling: Literal["prefix", "fcfs"] = "prefix"
    ageing_s: float = Field(2.0, ge=0)
    hold_back: bool = True
    watermark: float = Field(0.01, ge=0, lt=1)
    threads: int | None = Field(None, ge=1)
    world_size: Literal[1] = 1
    check_invariants: bool = False
    strict_blocks: bool = False
    log_blocks: bool = False
    cache: CacheConfig = CacheConfig()


class IndexConfig(_Part):
    """The Redis-fed index. `redis_url` None means: start a private server."""

    redis_url: str | None = Field(None, repr=False)  # it may hold a password
    key_prefix: str = Field("kvray", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    heartbeat_s: float = Field(0.5, gt=0)
    heartbeat_ttl_s: float = Field(3.0, gt=0)
    publish_interval_s: float = Field(0.05, ge=0)
    stream_max_entries: int = Field(20_000, ge=1000)
    timeout_s: float = Field(2.0, gt=0)
    stale_after_s: float = Field(2.0, gt=0)

    @model_validator(mode="after")
    def _ttl_outlives_heartbeats(self) -> IndexConfig:
        if self.heartbeat_ttl_s < 2 * self.heartbeat_s:
            raise ValueError("heartbeat_ttl_s must be at least twice heartbeat_s")
        return self


class RouterConfig(_Part):
    policy: Literal["estimated_ttft", "least_uncached", "round_robin"] = "estimated_ttft"
    replicas: int = Field(1, ge=1)
    default_prefill_tokens_per_s: float = Field(1000.0, gt=0)
    near_tie: float = Field(0.05, ge=0, le=1)


class ServeConfig(_Part):
    """Where the cluster listens and how many replicas it runs.

    drain_s: how long answers may go on when a replica is stopped. Whatever ends processes from outside (Kubernetes'
    terminationGracePeriodSeconds) must allow more: `stop_limit_s`.
    """

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    grpc_port: int = Field(9000, ge=1, le=65535)
    replicas: int = Field(2, ge=1)
    name: str = "kvray"
    cpus_per_replica: float = Field(0.5, ge=0)
    gpus_per_replica: float = Field(0, ge=0)
    drain_s: float = Field(30.0, ge=0)

    @property
    def stop_limit_s(self) -> float:
        """When Serve kills a replica that it stops: after its drain and a margin to leave the index. 0: at once."""
        return self.drain_s + STOP_MARGIN_S if self.drain_s else 0.0


class AutoscalingConfig(_Part):
    """How many replicas there are, by what they have to do (cluster.core.autoscaling_policy).

    ttft_target_s: to be met by 90 % of the requests.  utilisation: at most, the share of its time in which a
    replica prefills or somebody waits there.  margin: spare replicas, times the root of those that the work keeps busy;
    0 leaves it to `utilisation`.  memory_use: how full live requests may make KV memory and `max_num_seqs`.  start_s:
    how long a new replica takes until it serves, its node included.  to_zero_delay_s: without any request, if
    min_replicas is 0.
    coldest_victim: replicas with the coldest caches go first (cluster.coldest_victim says what that risks); Serve's
    controller needs RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH for it, which `kvray serve` sets.
    """

    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(ge=1)
    ttft_target_s: float = Field(2.0, gt=0, le=3600)
    utilisation: float = Field(0.8, ge=0.05, le=0.95)
    margin: float = Field(2.4, ge=0, le=20)
    memory_use: float = Field(0.8, ge=0.05, le=1)
    look_back_s: float = Field(150.0, ge=5, le=3600)
    up_delay_s: float = Field(10.0, ge=0, le=3600)
    down_delay_s: float = Field(300.0, ge=0, le=86_400)
    to_zero_delay_s: float = Field(900.0, ge=0, le=604_800)
    start_s: float = Field(120.0, ge=0, le=3600)
    coldest_victim: bool = False

    @model_validator(mode="after")
    def _ordered(self) -> AutoscalingConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})")
        return self

    def parameters(self) -> ScalingParameters:
        return ScalingParameters(**self.model_dump(exclude={"coldest_victim"}))


class ClusterConfig(_Part):
    """The whole tree. `served_model_name` is the public name; None means the model's own.

    autoscaling: None keeps serve.replicas replicas; otherwise that is how many there are at first.
    """

    engine: EngineConfig = EngineConfig()
    index: IndexConfig = IndexConfig()
    router: RouterConfig = RouterConfig()
    serve: ServeConfig = ServeConfig()
    autoscaling: AutoscalingConfig | None = None
    served_model_name: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _can_scale(self) -> ClusterConfig:
        if (scaling := self.autoscaling) is None:
            return self
        if not scaling.min_replicas <= self.serve.replicas <= scaling.max_replicas:
            raise ValueError(
                f"serve.replicas ({self.serve.replicas}), the number at first, must be within autoscaling's "
                f"min_replicas ({scaling.min_replicas}) and max_replicas ({scaling.max_replicas})"
            )
        if not self.serve.drain_s:
            raise ValueError("autoscaling needs serve.drain_s above 0: a replica that goes would cut its answers off")
        return self

    def as_told_to_replicas(self) -> ClusterConfig:
        """Without what only says how many there are: Serve replaces every replica that would be told something else."""
        one: dict[str, BaseModel] = {
            "serve": self.serve.model_copy(update={"replicas": 1}),
            "router": self.router.model_copy(update={"replicas": 1}),
        }
        scaling = self.autoscaling
        if scaling is not None:
            told = scaling.model_dump(include={"ttft_target_s", "coldest_victim"})
            one["autoscaling"] = AutoscalingConfig(min_replicas=min(scaling.min_replicas, 1), max_replicas=1, **told)
        return self.model_copy(update=one)

    @property
    def public_name(self) -> str:
        """The model name clients use."""
        if self.served_model_name is not None:
            return self.served_model_name
        if self.engine.model == "demo":
            return "SmolLM2-135M-Instruct"
        path = PurePath(self.engine.model)
        local = path.is_absolute() or self.engine.model.startswith((".", "~")) or "://" in self.engine.model
        return (path.name if local else "") or self.engine.model
