"""SeenPrompts: the beginnings of recent prompts, exact to the token.

    parent hash -> the chunks that followed it, as packed token ids, sorted
    root  -> [system prompt 0:64]
    h(0)  -> [system prompt 64:128]
    h(1)  -> [question a ...], [question b ...]      a third question parts from one of its two neighbours in this order

Two generations: what is seen goes into the young one; when that is full it becomes the old one, and what was old is
forgotten. So a prompt that comes again and again stays known, and nothing has to be moved on a hit.

Owns: the token ids of recent prompts, within `max_bytes`.
Does not: keep text, know replicas, or tell one request from another.
Invariants: a generation holds prompts whole, so what it knows is closed under prefix; memory is bounded; a lookup costs
a few steps however long the prompt is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.core.hashing import ChunkHash
from router.route_hint import TOKEN_BYTES

MAX_BYTES = 32 * 2**20
_CHUNK_OVERHEAD = 320  # a set's and a dict's entry, two objects


class Seen(NamedTuple):
    """tokens: leading tokens that some earlier prompt had.  forked: one of those went on with another token."""

    tokens: int = 0
    forked: bool = False


NOTHING_SEEN = Seen()


@dataclass(slots=True, eq=False)
class _Generation:
    chunks: set[ChunkHash] = field(default_factory=set)
    # Mostly there is one, and a list for each would be work for the garbage collector.
    followers: dict[ChunkHash, bytes | list[bytes]] = field(default_factory=dict)
    size: int = 0

    def depth(self, hashes: Sequence[ChunkHash]) -> int:
        """How many leading chunks are known."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in self.chunks:
                low = middle + 1
            else:
                high = middle
        return low


class SeenPrompts:
    """`root` names the namespace: what must be equal besides the tokens."""

    def __init__(self, chunk_tokens: int, *, max_bytes: int = MAX_BYTES) -> None:
        self._chunk_bytes = chunk_tokens * TOKEN_BYTES
        self._max_generation = max_bytes // 2
        self._young, self._old = _Generation(), _Generation()
        self._forgotten = _Generation()  # freed bit by bit: all at once would hold the event loop for milliseconds

    @property
    def size_bytes(self) -> int:
        """An estimate of the memory in use."""
        return self._young.size + self._old.size

    def add(self, root: ChunkHash, hashes: Sequence[ChunkHash], tokens: bytes) -> None:
        """This prompt has been seen. One that fills a generation alone is not kept."""
        pieces = len(hashes) + 1
        if len(tokens) + pieces * _CHUNK_OVERHEAD > self._max_generation:
            return
        if self._young.size > self._max_generation:
            self._young, self._old, self._forgotten = _Generation(), self._young, self._old
        self._free(2 * pieces)
        generation, size = self._young, self._chunk_bytes
        for number in range(generation.depth(hashes), pieces):
            piece = tokens[number * size : (number + 1) * size]
            if number < len(hashes):
                generation.chunks.add(hashes[number])
            if piece:
                self._follow(generation, hashes[number - 1] if number else root, piece)

    def find(self, root: ChunkHash, hashes: Sequence[ChunkHash], tokens: bytes) -> Seen:
        """The longest beginning of a prompt that was seen."""
        one, other = (self._find(generation, root, hashes, tokens) for generation in (self._young, self._old))
        if one.tokens == other.tokens:
            return Seen(one.tokens, one.forked or other.forked)
        return max(one, other)

    def _free(self, count: int) -> None:
        """Twice as fast as it fills again."""
        chunks, followers = self._forgotten.chunks, self._forgotten.followers
        for _ in range(min(count, max(len(chunks), len(followers)))):
            if chunks:
                chunks.pop()
            if followers:
                followers.popitem()

    def _follow(self, generation: _Generation, parent: ChunkHash, piece: bytes) -> None:
        known = generation.followers.get(parent)
        if known is None:
            generation.followers[parent] = piece
        else:
            if isinstance(known, bytes):
                if known.startswith(piece):
                    return
                known = generation.followers[parent] = [known]
            place = bisect_left(known, piece)
            if place < len(known) and known[place].startswith(piece):
                return
            known.insert(place, piece)
        generation.size += len(piece) + _CHUNK_OVERHEAD

    def _find(self, generation: _Generation, root: ChunkHash, hashes: Sequence[ChunkHash], tokens: bytes) -> Seen:
        if not generation.chunks and not generation.followers:
            return NOTHING_SEEN
        depth = generation.depth(hashes)
        known = generation.followers.get(hashes[depth - 1] if depth else root, [])
        if isinstance(known, bytes):
            known = [known]
        piece = tokens[depth * self._chunk_bytes : (depth + 1) * self._chunk_bytes]
        common, forked = 0, False
        place = bisect_left(known, piece)
        for neighbour in known[max(place - 1, 0) : place + 1]:  # nobody has more in common than these two
            shared = _common_tokens(piece, neighbour)
            goes_on = len(neighbour) > shared * TOKEN_BYTES and len(piece) > shared * TOKEN_BYTES
            if shared > common:
                common, forked = shared, goes_on
            elif shared == common:
                forked = forked or goes_on
        seen = depth * self._chunk_bytes // TOKEN_BYTES + common
        return Seen(seen, forked and seen > 0)


def _common_tokens(a: bytes, b: bytes) -> int:
    length = min(len(a), len(b))
    differing = int.from_bytes(a[:length], "little") ^ int.from_bytes(b[:length], "little")
    if not differing:
        return length // TOKEN_BYTES
    return ((differing & -differing).bit_length() - 1) // (8 * TOKEN_BYTES)
