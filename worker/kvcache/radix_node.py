"""RadixNode: one edge of the radix tree, a run of whole blocks, and its children.

Owns: token comparison within the edge, splitting, growing and shrinking of one node.
Does not: know the pool, events or the eviction order (radix_tree).
Invariants: len(tokens) = len(blocks) * block_size; a child is keyed by the tokens of its first block; a root has
no blocks and no parent.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_serials = itertools.count()


class RadixNode:
    __slots__ = (
        "block_size",
        "blocks",
        "children",
        "key",
        "last_access",
        "namespace",
        "parent",
        "queued",
        "serial",
        "tokens",
    )

    def __init__(
        self, block_size: int, tokens: Sequence[int] = (), blocks: Sequence[int] = (), namespace: str = ""
    ) -> None:
        self.block_size = block_size
        self.namespace = namespace  # of a root; not kept up to date further down
        self.tokens = list(tokens)
        self.blocks = list(blocks)
        self.key = tuple(self.tokens[:block_size])
        self.children: dict[tuple[int, ...], RadixNode] = {}
        self.parent: RadixNode | None = None
        self.last_access = 0
        self.queued = False
        self.serial = next(_serials)  # breaks ties in the eviction heap

    def child_of(self, tokens: Sequence[int], start: int) -> RadixNode | None:
        """The child whose first block equals tokens[start : start + block_size], if any."""
        if start + self.block_size > len(tokens):
            return None
        return self.children.get(tuple(tokens[start : start + self.block_size]))

    def common_blocks(self, tokens: Sequence[int], start: int) -> int:
        """How many leading blocks of this edge equal `tokens` from `start` on.

        Slices are compared in C; a mismatch is located by bisection, so a long edge costs O(edge), not O(edge) steps.
        """
        limit = min(len(self.blocks), (len(tokens) - start) // self.block_size)
        low, high = 0, limit
        while low < high:
            middle = high if low == 0 and high == limit else (low + high + 1) // 2
            a, b = low * self.block_size, middle * self.block_size
            if self.tokens[a:b] == list(tokens[start + a : start + b]):
                low = middle
            else:
                high = middle - 1
        return low

    def add_child(self, tokens: Sequence[int], blocks: Sequence[int]) -> RadixNode:
        child = RadixNode(self.block_size, tokens, blocks)
        child.parent = self
        self.children[child.key] = child
        return child

    def split(self, at: int) -> RadixNode:
        """Move the first `at` blocks into a new parent of this node and return it. This node keeps its identity."""
        assert self.parent is not None and 0 < at < len(self.blocks)
        cut = at * self.block_size
        upper = self.parent.add_child(self.tokens[:cut], self.blocks[:at])
        upper.last_access = self.last_access
        self.tokens, self.blocks = self.tokens[cut:], self.blocks[at:]
        self.key = tuple(self.tokens[: self.block_size])
        self.parent = upper
        upper.children[self.key] = self
        return upper

    def grow(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        self.blocks.extend(blocks)

    def pop_block(self) -> int:
        del self.tokens[-self.block_size :]
        return self.blocks.pop()

    def detach(self) -> RadixNode:
        """Leave the parent and return it."""
        parent = self.parent
        assert parent is not None and parent.children.get(self.key) is self
        del parent.children[self.key]
        self.parent = None
        return parent

    def check(self, *, is_root: bool) -> None:
        assert len(self.tokens) == len(self.blocks) * self.block_size, "an edge is not whole blocks"
        assert bool(self.blocks) != is_root, "only a root has an empty edge"
        for key, child in self.children.items():
            assert key == child.key == tuple(child.tokens[: self.block_size]), "a child under the wrong key"
            assert child.parent is self, "a child with another parent"
            assert child.last_access <= self.last_access, "a child used after its parent"
