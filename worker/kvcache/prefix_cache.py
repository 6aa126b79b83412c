"""PrefixCache: what BlockManager asks of whatever finds cached prefixes.

Owns: the protocol, the namespace of cached KV, and the answer of a lookup.
Does not: implement it (worker.kvcache.radix_tree, worker.kvcache.chunk_hash_cache) or hold references.
Invariants: a block is findable only while its KV is valid; every ancestor of a findable block is findable; a lookup
never crosses namespaces; events are in the order in which the content changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from cluster.core.events import CacheEvent
from cluster.core.hashing import ChunkHash


class CacheNamespace(NamedTuple):
    """What must be equal for KV to be the same numbers. The fields are apart, so a salt never equals an adapter."""

    kv_fingerprint: str = ""
    adapter: str = ""
    salt: str = ""


class PrefixHit(NamedTuple):
    """The longest cached prefix of a prompt.

    blocks: whole blocks, to be shared.  tail_block: a block whose first `tail_tokens` slots continue the prefix; it is
    to be copied, never shared, because its other slots belong to other tokens.
    """

    blocks: list[int]
    tail_block: int | None = None
    tail_tokens: int = 0


class PrefixCache(Protocol):
    @property
    def hit_unit(self) -> int:
        """Tokens: what is found of a prompt is a whole number of these."""

    @property
    def present_chunks(self) -> set[ChunkHash]:
        """Chunks whose last block is cached now; what the events add up to."""

    @property
    def changes(self) -> int:
        """Another number whenever `match` may find something else than before."""

    def match(self, namespace: CacheNamespace, tokens: Sequence[int], *, touch: bool = True) -> PrefixHit:
        """The longest cached prefix. The caller shares the blocks before anything else happens."""

    def insert(
        self,
        namespace: CacheNamespace,
        tokens: Sequence[int],
        blocks: Sequence[int],
        chunk_hashes: Sequence[ChunkHash],
    ) -> list[int]:
        """Make the first len(blocks) whole blocks of `tokens` findable; return the ids that stay.

        They are computed and in use, and nobody holds one of them without holding those before it.

        Where the answer differs from `blocks`, the cache already had that block; the caller moves its table there
        before it releases its own. A cache may take whole chunks only, so a block can also enter, or be folded, later
        than in the call that brought it.
        """

    def insert_tail(self, namespace: CacheNamespace, tokens: Sequence[int], block_id: int) -> None:
        """Make the tokens behind the last whole block findable: they are in the first slots of `block_id`, in use."""

    def claimed_slots(self, block_id: int) -> int:
        """How many slots of a block are findable content and must not be written; 0 when it is not cached."""

    def on_idle(self, block_ids: Sequence[int]) -> None:
        """These cached blocks lost their last holder, in this order."""

    def evict(self, count: int) -> int:
        """Free `count` idle blocks, or all when there are fewer; return how many, which may be a chunk less one more.

        Ends of chains go first.
        """

    def clear(self) -> None:
        """Forget everything at once. Idle blocks become free, blocks in use stay with their holders."""

    def take_events(self) -> list[CacheEvent]:
        """Events since the last call, in order."""

    def check_invariants(self) -> None:
        """Walk everything; AssertionError names what is wrong."""

    def audit(self) -> Iterator[None]:
        """`check_invariants` in pieces of well under a millisecond. Nothing may change until it ends."""
