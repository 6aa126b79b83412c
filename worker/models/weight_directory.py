"""Which files of a model's directory hold its weights.

Owns: the choice among safetensors (whole or sharded) and GGUF, and reading their headers.
Does not: give tensors (worker.models.checkpoint) or digests (worker.models.fingerprint).
Invariants: safetensors win over GGUF; a directory that leaves a choice is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

from cluster.core.errors import ConfigError
from worker.models.gguf_header import read_gguf
from worker.models.safetensors_header import read_safetensors
from worker.models.weight_file import WeightFile

GGUF_SUFFIX = ".gguf"
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def read_weight_files(model_dir: Path) -> tuple[WeightFile, ...]:
    """The headers of all weight files, by name; ConfigError names the file that is missing or broken."""
    return tuple(
        read_gguf(path) if path.suffix == GGUF_SUFFIX else read_safetensors(path) for path in _weight_paths(model_dir)
    )


def _weight_paths(model_dir: Path) -> list[Path]:
    if (model_dir / _WHOLE).exists():
        return [model_dir / _WHOLE]
    if (model_dir / _INDEX).exists():
        return _shards(model_dir / _INDEX)
    paths = sorted(model_dir.glob("*.safetensors"))
    if paths:
        return paths
    paths = sorted(model_dir.glob(f"*{GGUF_SUFFIX}"))
    if len(paths) > 1:
        raise ConfigError(f"{model_dir} has {len(paths)} *.gguf files ({paths[0].name}, ...); keep or merge to one")
    if not paths:
        raise ConfigError(f"{model_dir} has no *.safetensors or *.gguf weights; other formats are not loaded")
    return paths


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{index} has no weight_map") from None
    for name in names:
        if not (index.parent / name).is_file():
            raise ConfigError(f"{index} names {name}, which is missing")
    return [index.parent / name for name in names]
