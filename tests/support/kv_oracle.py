"""What must hold in a model-free KV world, computed naively: lineages of tokens, and what the pages say is cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash, RouteScheme, hash_chunk, root_hash

Fingerprint = tuple[int, int, int]  # layer, lineage, position
Page = list[list[Fingerprint | None]]  # [layer][slot]


class Lineages:
    """Numbers for token histories: equal histories under one salt have the same number, all others differ."""

    def __init__(self, scheme: RouteScheme) -> None:
        self._scheme = scheme
        self._numbers: dict[tuple[int | str, int], int] = {}
        self.before: list[int] = []  # the history one token shorter; the root of a salt is its own
        self.chunk_of: dict[int, ChunkHash] = {}  # of histories that end a chunk
        self.parent_of: dict[ChunkHash, ChunkHash | None] = {}

    def of(self, salt: str, tokens: Sequence[int]) -> list[int]:
        """The lineage at every position of `tokens`."""
        size = self._scheme.chunk_tokens
        at = self._number(salt, -1)
        numbers: list[int] = []
        for position, token in enumerate(tokens):
            at = self._number(at, token)
            numbers.append(at)
            if (position + 1) % size == 0 and at not in self.chunk_of:
                above = self.chunk_of[numbers[position - size]] if position >= size else None
                root = root_hash(self._scheme.with_salt(salt))
                self.chunk_of[at] = hash_chunk(above or root, tokens[position + 1 - size : position + 1])
                self.parent_of[self.chunk_of[at]] = above
        return numbers

    def _number(self, parent: int | str, token: int) -> int:
        number = self._numbers.setdefault((parent, token), len(self.before))
        if number == len(self.before):
            self.before.append(parent if isinstance(parent, int) else number)
        return number


class ReplayedChunks:
    """What a reader of the events believes. AssertionError when an event cannot be right."""

    def __init__(self, lineages: Lineages) -> None:
        self._lineages = lineages
        self.present: set[ChunkHash] = set()

    def apply(self, event: CacheEvent) -> None:
        if event.kind is CacheEventKind.CLEARED:
            assert not event.chunk_hashes
            self.present.clear()
            return
        parent_of = self._lineages.parent_of
        for chunk in event.chunk_hashes:
            if event.kind is CacheEventKind.STORED:
                assert chunk not in self.present, "a chunk was stored twice"
                assert parent_of[chunk] is None or parent_of[chunk] in self.present, "stored before its parent"
                self.present.add(chunk)
            else:
                assert chunk in self.present, "an absent chunk was removed"
                self.present.remove(chunk)
                assert all(parent_of[other] != chunk for other in self.present), "removed before its child"


@dataclass
class CachedContent:
    """What the pages hold in the slots that the cache offers: the naive truth that every lookup is compared with."""

    block_size: int
    grain: int  # content is cached once, in units of so many tokens
    lineages: Lineages
    claims: dict[int, Page] = field(default_factory=dict)  # by block: the offered slots
    held: set[int] = field(default_factory=set)  # lineages that some offered slot has
    whole: dict[int, int] = field(default_factory=dict)  # lineage at the end of a whole block -> block

    def update(self, pages: Sequence[Page], offered: dict[int, int]) -> None:
        """`offered`: how many slots of each cached block are findable. Checks that nobody wrote into them."""
        claims = {block: [layer[:slots] for layer in pages[block]] for block, slots in offered.items()}
        firsts: list[Fingerprint] = []
        held: list[int] = []
        self.whole = {}
        for block, claim in claims.items():
            for layer, before in zip(claim, self.claims.get(block, claim), strict=True):
                both = min(len(layer), len(before))
                assert layer[:both] == before[:both], f"cached block {block} was written: {before} became {layer}"
            prints = [one for one in claim[0] if one is not None]
            assert 0 < len(prints) == len(claim[0]), f"cached block {block} offers slots that were never written"
            firsts.append(prints[0])
            held += [lineage for _, lineage, _ in prints]
            _, end, position = prints[-1]
            if len(prints) == self.block_size:
                once = (position + 1) % self.grain == 0
                assert not (once and end in self.whole), f"blocks {self.whole.get(end)} and {block} cache the same"
                self.whole[end] = block
        for _, lineage, position in firsts:
            parent = self.lineages.before[lineage]
            assert position == 0 or parent in self.whole, "the ancestor of a cached block is not cached"
        self.claims, self.held = claims, set(held)

    def hit(self, numbers: Sequence[int]) -> int:
        """How many tokens of this history are cached, to the token."""
        return next((at for at, number in enumerate(numbers) if number not in self.held), len(numbers))

    def chunks(self) -> set[ChunkHash]:
        """The chunks whose last block is cached."""
        return {self.lineages.chunk_of[end] for end in self.whole if end in self.lineages.chunk_of}
