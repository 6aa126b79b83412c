"""WeightFile: what the header of a weight file says, whatever its format.

Owns: the two records, and the checks that every format needs.
Does not: parse a format (worker.models.safetensors_header, worker.models.gguf_header) or read weights.
Invariants: the bytes of every tensor of a WeightFile lie inside its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from cluster.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor: where its bytes are and what they mean."""

    name: str  # as the file calls it
    path: Path
    kind: str  # "F32", "F16", "BF16", a quantised type, or whatever else the file says
    shape: tuple[int, ...]
    offset: int  # bytes from the file's start
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One file. `header_bytes` is where the header ends and the tensors' bytes may begin."""

    path: Path
    size: int
    header_bytes: int
    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, Any]

    def __post_init__(self) -> None:
        for tensor in self.tensors:
            if tensor.offset < self.header_bytes or tensor.offset + tensor.num_bytes > self.size:
                raise ConfigError(f"{self.path} is truncated or corrupt: tensor {tensor.name} lies outside the file")
