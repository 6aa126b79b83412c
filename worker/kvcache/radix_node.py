"""RadixNode: one edge of the radix tree, a run of whole blocks, and its children.

Tokens are kept as bytes, four to a token, so that comparing runs of them is one memcmp and a token costs 4 bytes. A
child whose edge is shorter than a block is a *tail*: the tokens behind the last whole block of some sequence.

Owns: comparison within the edge and among the children, splitting, growing and shrinking of one node.
Does not: know the pool, events or the eviction order (radix_tree).
Invariants: an edge is whole blocks, or a tail, which has one block and no children; a child is keyed by its first
block; `order` lists the children's keys sorted; no tail's tokens are the beginning of a sibling's.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

TOKEN_BYTES = 4


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids (0 <= id < 2**31) as bytes; those of an array("I") are copied as they are."""
    if not isinstance(tokens, array):
        tokens = array("I", tokens)  # three times as fast as "i", whose items are parsed one by one
    assert tokens.typecode == "I", "an array of another type would have other bytes"
    return tokens.tobytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """Length of the common beginning, in tokens."""
    limit = min(len(a), len(b))
    for at in range(0, limit, TOKEN_BYTES):
        if a[at : at + TOKEN_BYTES] != b[at : at + TOKEN_BYTES]:
            return at // TOKEN_BYTES
    return limit // TOKEN_BYTES


class RadixNode:
    """`block_bytes` = block size * TOKEN_BYTES; names with `_bytes` count bytes of packed tokens."""

    __slots__ = ("block_bytes", "blocks", "children", "last_access", "order", "packed", "parent", "queued", "serial")

    def __init__(self, block_bytes: int, serial: int, packed: bytes = b"", blocks: Iterable[int] = ()) -> None:
        self.block_bytes = block_bytes
        self.serial = serial  # breaks ties in the eviction heap
        self.packed = bytearray(packed)
        self.blocks = array("i", blocks)
        self.children: dict[bytes, RadixNode] = {}
        self.order: list[bytes] = []
        self.parent: RadixNode | None = None
        self.last_access = 0
        self.queued = False

    @property
    def key(self) -> bytes:
        return bytes(self.packed[: self.block_bytes])

    @property
    def is_tail(self) -> bool:
        return 0 < len(self.packed) < self.block_bytes

    def child_of(self, packed: bytes, at_bytes: int) -> RadixNode | None:
        """The child whose first block equals the block of `packed` at `at_bytes`, if any. Never a tail."""
        key = packed[at_bytes : at_bytes + self.block_bytes]
        return self.children.get(key) if len(key) == self.block_bytes else None

    def common_blocks(self, packed: bytes, at_bytes: int) -> int:
        """How many leading blocks of this edge equal `packed` from `at_bytes` on.

        Slices are compared in C; a mismatch is located by bisection, so a long edge costs O(edge), not O(edge) steps.
        """
        size = self.block_bytes
        limit = min(len(self.blocks), (len(packed) - at_bytes) // size)
        low, high = 0, limit
        while low < high:
            middle = high if low == 0 and high == limit else (low + high + 1) // 2
            a, b = low * size, middle * size
            if self.packed[a:b] == packed[at_bytes + a : at_bytes + b]:
                low = middle
            else:
                high = middle - 1
        return low

    def closest_child(self, rest: bytes) -> tuple[RadixNode, int] | None:
        """The child whose first block shares the longest beginning with `rest`, and how many tokens that is.

        In sorted order the longest common beginning is always with a neighbour, so this is a bisection however many
        children there are.
        """
        key = rest[: self.block_bytes]
        place = bisect_left(self.order, key)
        best: tuple[int, bytes] = (0, b"")
        for neighbour in self.order[max(place - 1, 0) : place + 1]:
            best = max(best, (common_tokens(neighbour, key), neighbour))
        return (self.children[best[1]], best[0]) if best[0] else None

    def tail_before(self, key: bytes) -> RadixNode | None:
        """The tail whose tokens `key` begins with. There is at most one, and it stands right before `key`."""
        place = bisect_left(self.order, key)
        if place == 0 or len(self.order[place - 1]) == self.block_bytes or not key.startswith(self.order[place - 1]):
            return None
        return self.children[self.order[place - 1]]

    def has_child_beginning_with(self, tail: bytes) -> bool:
        place = bisect_left(self.order, tail)
        return place < len(self.order) and self.order[place].startswith(tail)

    def add_child(self, child: RadixNode) -> RadixNode:
        child.parent = self
        key = child.key
        self.children[key] = child
        insort(self.order, key)
        return child

    def split(self, at: int, serial: int) -> RadixNode:
        """Move the first `at` blocks into a new parent of this node and return it. This node keeps its identity."""
        assert self.parent is not None and 0 < at < len(self.blocks)
        cut = at * self.block_bytes
        upper = RadixNode(self.block_bytes, serial, bytes(self.packed[:cut]), self.blocks[:at])
        upper.last_access = self.last_access
        upper.parent = self.parent
        self.parent.children[upper.key] = upper  # the same key, so the same place in `order`
        self.packed, self.blocks = self.packed[cut:], self.blocks[at:]
        upper.add_child(self)
        return upper

    def grow(self, packed: bytes, blocks: Iterable[int]) -> None:
        self.packed += packed
        self.blocks.extend(blocks)

    def pop_blocks(self, count: int) -> array[int]:
        """Drop the last blocks, with their tokens. Returns them, the last one first."""
        keep = len(self.blocks) - count
        gone = self.blocks[keep:]
        gone.reverse()
        del self.blocks[keep:], self.packed[keep * self.block_bytes :]
        return gone

    def detach(self, key: bytes) -> RadixNode:
        """Leave the parent, where this node stands under `key`, and return it."""
        parent = self.parent
        assert parent is not None and parent.children.get(key) is self
        del parent.children[key]
        place = bisect_left(parent.order, key)
        del parent.order[place]
        self.parent = None
        return parent

    def check(self, *, is_root: bool) -> None:
        whole = len(self.packed) == len(self.blocks) * self.block_bytes
        tail = self.is_tail and len(self.blocks) == 1 and not self.children
        assert whole or tail, "an edge is neither whole blocks nor a tail"
        assert bool(self.blocks) != is_root, "only a root has an empty edge"
        assert self.order == sorted(self.children), "the order of the children is wrong"
        for before, key in zip(self.order, self.order[1:], strict=False):
            assert len(before) == self.block_bytes or not key.startswith(before), "a tail that a sibling contains"
        for key, child in self.children.items():
            assert key == child.key, "a child under the wrong key"
            assert child.parent is self, "a child with another parent"
            assert child.last_access <= self.last_access, "a child used after its parent"
