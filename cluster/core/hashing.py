"""Chunk hashes: the one implementation that router and worker share.

A prompt is cut into chunks of `chunk_tokens` tokens. The hash of a chunk is
``blake2b-128(parent_hash || tokens as little-endian u32)``; the parent of chunk 0 is the root hash of the
`RouteScheme`. So a chunk hash names the chunk *and everything before it*, and two models, tokenizers, chunk
sizes, adapters or salts can never share one.

Owns: RouteScheme, root_hash, hash_chunk, hash_prompt, hash_packed, blinded, and digest_of for every other digest.
Does not: decide that KV may be reused. A hash is a routing hint; the radix tree compares tokens.
Invariants: no seed from the process (golden vectors in the tests); a prefix of the tokens gives a prefix of
the hashes; a partial last chunk has no hash.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

ChunkHash = NewType("ChunkHash", bytes)

SCHEME_VERSION = 1
HASH_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteScheme:
    """What must be equal for the same text to mean the same tokens on router and worker."""

    tokenizer_revision: str
    model_revision: str
    chunk_tokens: int = 64
    adapter: str = ""
    salt: str = ""
    version: int = SCHEME_VERSION

    def with_salt(self, salt: str) -> RouteScheme:
        return RouteScheme(
            tokenizer_revision=self.tokenizer_revision,
            model_revision=self.model_revision,
            chunk_tokens=self.chunk_tokens,
            adapter=self.adapter,
            salt=salt,
            version=self.version,
        )

    @property
    def digest(self) -> str:
        """Hex form of the root hash, compared at registration."""
        return root_hash(self).hex()


def digest_of(*parts: bytes) -> str:
    """Hex digest over length-prefixed parts, for fingerprints of files and settings."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.hexdigest()


def root_hash(scheme: RouteScheme) -> ChunkHash:
    """Digest of the scheme's fields, each tagged and length-prefixed so that no field can imitate another."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=b"kvray-route")
    for tag, value in (
        ("version", str(scheme.version)),
        ("tokenizer", scheme.tokenizer_revision),
        ("model", scheme.model_revision),
        ("chunk_tokens", str(scheme.chunk_tokens)),
        ("adapter", scheme.adapter),
        ("salt", scheme.salt),
    ):
        for part in (tag.encode(), value.encode()):
            digest.update(struct.pack("<I", len(part)) + part)
    return ChunkHash(digest.digest())


def hash_chunk(parent: ChunkHash, tokens: Sequence[int]) -> ChunkHash:
    """Hash of one full chunk after `parent`. Tokens are ids in [0, 2**32)."""
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    return ChunkHash(hashlib.blake2b(parent + packed, digest_size=HASH_BYTES).digest())


def hash_prompt(root: ChunkHash, tokens: Sequence[int], chunk_tokens: int) -> list[ChunkHash]:
    """Hashes of all full chunks of `tokens`, in order: `hash_chunk` over and over, with the tokens packed at once."""
    whole = len(tokens) - len(tokens) % chunk_tokens
    return hash_packed(root, pack_tokens(tokens[:whole]), chunk_tokens)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Little-endian u32, as they are hashed."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def hash_packed(root: ChunkHash, packed: bytes, chunk_tokens: int) -> list[ChunkHash]:
    """`hash_prompt` of tokens that are packed already."""
    packed = packed[: len(packed) - len(packed) % (4 * chunk_tokens)]
    hashes: list[ChunkHash] = []
    parent: bytes = root
    for (chunk,) in struct.iter_unpack(f"{4 * chunk_tokens}s", packed):
        parent = hashlib.blake2b(parent + chunk, digest_size=HASH_BYTES).digest()
        hashes.append(ChunkHash(parent))
    return hashes


def blinded(key: bytes, hashes: Sequence[ChunkHash]) -> list[int]:
    """64-bit numbers that say which of the hashes are equal, and nothing else to who does not know the key.

    key: 16 to 64 bytes.
    """
    return [
        int.from_bytes(hashlib.blake2b(one, digest_size=8, key=key, person=b"kvray-blind").digest(), "little")
        for one in hashes
    ]
