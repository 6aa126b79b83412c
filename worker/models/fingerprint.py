"""Digests that say when two replicas hold the same model and when KV blocks mean the same numbers.

A model's revision covers config.json, and of every safetensors file its name, its size, its whole header (names, types,
shapes, offsets) and 64 KiB of content at every 16 MiB, the last 64 KiB included. Reading all of a large checkpoint
would take minutes; fine-tuning changes practically every weight, so samples see it.

Owns: model_revision, kv_fingerprint, checkpoint_bytes.
Does not: load weights or import torch; the tokenizer's revision is in cluster.tokenizer.
Invariants: a digest depends on content only, not on paths, times or the order in which a directory lists its files.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cluster.core.errors import ConfigError
from cluster.core.hashing import digest_of

SAMPLE_BYTES = 64 * 1024
SAMPLE_STRIDE = 16 * 1024 * 1024


def model_revision(model_dir: Path) -> str:
    """Hex digest of the model's configuration and weights."""
    return digest_of(b"model", *_content(model_dir))


def kv_fingerprint(revision: str, **facts: Any) -> str:
    """Hex digest of everything that decides what the bytes of a KV block mean.

    facts: dtype, layers, KV heads, head dim, block size, layout, rope parameters; JSON values, order does not matter.
    """
    return digest_of(b"kv", revision.encode(), json.dumps(facts, sort_keys=True).encode())


def checkpoint_bytes(model_dir: Path, itemsize: int) -> int:
    """Bytes of the weights once loaded with `itemsize` bytes per number, from the headers alone."""
    total = 0
    for path in _weight_files(model_dir):
        with path.open("rb") as file:
            header = json.loads(file.read(_raw_header(file.read(8), path)))
        header.pop("__metadata__", None)
        total += sum(itemsize * _product(tensor["shape"]) for tensor in header.values())
    return total


def _content(model_dir: Path) -> Iterator[bytes]:
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    yield json.dumps(config, sort_keys=True).encode()
    for path in _weight_files(model_dir):
        size = path.stat().st_size
        yield path.name.encode()
        yield str(size).encode()
        with path.open("rb") as file:
            header = _raw_header(file.read(8), path)
            yield file.read(header)
            start = 8 + header
            for offset in (*range(start, size, SAMPLE_STRIDE), max(start, size - SAMPLE_BYTES)):
                file.seek(offset)
                yield file.read(SAMPLE_BYTES)


def _weight_files(model_dir: Path) -> list[Path]:
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{model_dir} has no *.safetensors weights; other formats are not loaded")
    return files


def _raw_header(first: bytes, path: Path) -> int:
    """Length of a safetensors header, from the file's first 8 bytes."""
    length = int(struct.unpack("<Q", first)[0]) if len(first) == 8 else 0
    if not 0 < length <= path.stat().st_size - 8:
        raise ConfigError(f"{path} is not a complete safetensors file")
    return length


def _product(shape: Iterable[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
