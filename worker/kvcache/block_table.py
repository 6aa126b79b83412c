"""BlockTable: one live sequence's list of block ids, and how far its tokens are computed and in the cache.

Owns: the ids in position order, and the chunk hashes of the committed tokens.
Does not: count references (BlockPool) or decide who may write (BlockManager).
Invariants: committed blocks <= whole computed blocks; only a fork takes `room` away; a chunk hash depends only on the
tokens up to its chunk's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.core.hashing import ChunkHash, hash_prompt
from worker.kvcache.prefix_cache import CacheNamespace


@dataclass(slots=True, eq=False)
class BlockTable:
    namespace: CacheNamespace
    root: ChunkHash
    blocks: list[int]
    num_computed: int
    committed_blocks: int
    chunk_hashes: list[ChunkHash] = field(default_factory=list)
    tokens: Sequence[int] = ()  # as last committed: at least `num_computed` of them
    room: int = 0  # tokens up to which the slots behind `num_computed` are known to be this sequence's alone

    def fork(self, count: int, block_size: int, chunk_tokens: int) -> BlockTable:
        """The table of a sequence that goes on behind the first `count` computed tokens, in the same blocks."""
        self.room = 0
        return BlockTable(
            namespace=self.namespace,
            root=self.root,
            blocks=self.blocks[: -(-count // block_size)],
            num_computed=count,
            committed_blocks=min(self.committed_blocks, count // block_size),
            chunk_hashes=self.chunk_hashes[: count // chunk_tokens],
            tokens=self.tokens[:count],
        )

    def hash_chunks(self, num_tokens: int, chunk_tokens: int) -> None:
        """Hash the chunks that are whole within `num_tokens` and not hashed yet."""
        hashed = len(self.chunk_hashes) * chunk_tokens
        if num_tokens - hashed >= chunk_tokens:
            last = self.chunk_hashes[-1] if hashed else self.root
            self.chunk_hashes += hash_prompt(last, self.tokens[hashed:num_tokens], chunk_tokens)
