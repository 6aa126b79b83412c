"""route_scheme: the RouteScheme of a model directory, built the same way on router and worker.

Owns: which files say that the same text means the same tokens for the same model: the tokenizer (with its chat
template) and config.json.
Does not: look at weights. The weights' digest is the KvFingerprint, which guards KV itself; a router on a node
without weights must come to the same scheme.
Invariants: two directories with equal files give equal schemes, whatever their path.
"""

from __future__ import annotations

from pathlib import Path

from cluster.core.hashing import RouteScheme, digest_of
from cluster.tokenizer import Tokenizer


def route_scheme(model_dir: Path, tokenizer: Tokenizer, chunk_tokens: int) -> RouteScheme:
    return RouteScheme(
        tokenizer_revision=tokenizer.revision,
        model_revision=digest_of((model_dir / "config.json").read_bytes()),
        chunk_tokens=chunk_tokens,
    )
