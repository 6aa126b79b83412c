"""ModelCard: what the rest of a replica asks about a model, whoever runs it.

Owns: the geometry, the choice of a dtype, and reading the card of a lean model from its directory.
Does not: load weights or import transformers.
Invariants: a lean model's card equals what worker.models.transformers_backend says of the same directory.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from cluster.core.byte_size import format_bytes
from cluster.core.errors import ConfigError
from worker.models.decoder_spec import DecoderSpec, canonical_rope

logger = logging.getLogger(__name__)

_SLOW_HALF_CPUS = ("DEFAULT", "NO AVX", "AVX2")  # torch's names; from AVX512 on, half precision is the faster one


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """What the pool and the account need to know."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Facts that need no weights."""

    geometry: ModelGeometry
    vocab_size: int
    model_limit: int  # tokens
    eos_token_ids: tuple[int, ...]
    rope_parameters: Mapping[str, Any]
    stored_dtype: str | None  # torch's name of the dtype that config.json gives

    @classmethod
    def read(cls, model_dir: Path, spec: DecoderSpec) -> ModelCard:
        """From config.json and generation_config.json; `spec` is that of the same directory."""
        config = read_json(model_dir / "config.json")
        return cls(
            geometry=ModelGeometry(
                num_layers=spec.num_layers,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
            ),
            vocab_size=spec.vocab_size,
            model_limit=spec.model_limit,
            eos_token_ids=_eos_token_ids(model_dir, config),
            rope_parameters=canonical_rope(config),
            stored_dtype=config.get("dtype") or config.get("torch_dtype"),
        )


class ModelProperties(Protocol):
    """What every loaded model says of itself, whoever runs it."""

    dtype: torch.dtype
    weight_bytes: int

    @property
    def geometry(self) -> ModelGeometry: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def model_limit(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def rope_parameters(self) -> dict[str, Any]: ...


class CardProperties:
    """ModelProperties of a lean model, from its card."""

    _card: ModelCard

    @property
    def geometry(self) -> ModelGeometry:
        return self._card.geometry

    @property
    def vocab_size(self) -> int:
        return self._card.vocab_size

    @property
    def model_limit(self) -> int:
        return self._card.model_limit

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._card.eos_token_ids

    @property
    def rope_parameters(self) -> dict[str, Any]:
        return dict(self._card.rope_parameters)


def require_memory(name: str, needed: int, free_bytes: int, dtype: torch.dtype, device: str) -> None:
    """ConfigError when weights of `needed` bytes do not fit."""
    if needed > free_bytes:
        raise ConfigError(
            f"{name} needs {format_bytes(needed)} ({needed} bytes) for its weights in {dtype_name(dtype)}, "
            f"but {device} has {format_bytes(free_bytes)} free"
        )


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file; ConfigError if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"cannot read {path}: it holds no JSON object")
    return content


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without its module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def choose_dtype(name: str, stored: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """The named dtype; "auto" is the checkpoint's, but float32 on CPUs whose matrix units know no half precision."""
    chosen = stored if name == "auto" else name
    if isinstance(chosen, str):
        chosen = getattr(torch, chosen, None)
    if not isinstance(chosen, torch.dtype):
        return torch.float32
    if name == "auto" and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in _SLOW_HALF_CPUS:
        logger.info("dtype float32: this CPU computes %s several times slower", dtype_name(chosen))
        return torch.float32
    return chosen


def _eos_token_ids(model_dir: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """From generation_config.json, else config.json; one id, a list or none."""
    path = model_dir / "generation_config.json"
    eos = read_json(path).get("eos_token_id") if path.exists() else None
    if eos is None:
        eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
