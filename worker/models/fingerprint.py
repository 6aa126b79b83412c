"""Digests that say when two replicas hold the same model and when KV blocks mean the same numbers.

A model's revision covers config.json, and of every weight file its name, its size, its whole header (names, types,
shapes, offsets) and 64 KiB of content at every 16 MiB, the last 64 KiB included. Reading all of a large checkpoint
would take minutes; fine-tuning changes practically every weight, so samples see it.

Owns: model_revision, kv_fingerprint, checkpoint_bytes.
Does not: load weights or import torch; the tokenizer's revision is in cluster.tokenizer.
Invariants: a digest depends on content only, not on paths, times or the order in which a directory lists its files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.core.hashing import digest_of
from worker.models.weight_directory import read_weight_files

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
    return sum(itemsize * tensor.num_elements for file in read_weight_files(model_dir) for tensor in file.tensors)


def _content(model_dir: Path) -> Iterator[bytes]:
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    yield json.dumps(config, sort_keys=True).encode()
    for weights in read_weight_files(model_dir):
        yield weights.path.name.encode()
        yield str(weights.size).encode()
        start = weights.header_bytes
        with weights.path.open("rb") as file:
            yield file.read(start)
            for offset in (*range(start, weights.size, SAMPLE_STRIDE), max(start, weights.size - SAMPLE_BYTES)):
                file.seek(offset)
                yield file.read(SAMPLE_BYTES)
