"""MemoryPolicy: a way to give KV memory to requests, in tokens; and the two contiguous ones of the article.

    reserve   a region for the longest possible length, taken at the start from one arena by first fit
    grow      a tensor per request, copied into a larger one when it is full; both exist during the copy

Owns: the protocol, ReservedMemory and GrowingMemory.
Does not: drive requests (memory_drive) or page (paged_memory).
Invariants: a refused `admit` or `grow` changes nothing; `top` counts what exists during a copy as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cluster.lab.contiguous_arena import ContiguousArena
from cluster.lab.mixed_requests import MixedRequest


class MemoryPolicy(Protocol):
    @property
    def allocated(self) -> int:
        """Tokens' worth of memory that nobody else can have."""

    @property
    def unusable(self) -> int:
        """Free tokens that the last refused request could not use although they were enough."""

    copied: int  # tokens, so far

    def admit(self, request: MixedRequest) -> bool:
        """Room for its prompt."""

    def grow(self, name: str, tokens: int) -> bool:
        """Room for `tokens` in all."""

    def release(self, name: str) -> None: ...

    def take_top(self) -> int:
        """The most that was allocated since the last call."""


class ReservedMemory:
    """`length`: of the region that a request gets."""

    def __init__(self, budget: int, length: Callable[[MixedRequest], int]) -> None:
        self._arena = ContiguousArena(budget)
        self._length = length
        self._regions: dict[str, tuple[int, int]] = {}
        self._top = 0
        self.copied = 0
        self.unusable = 0

    @property
    def allocated(self) -> int:
        return self._arena.size - self._arena.free

    def admit(self, request: MixedRequest) -> bool:
        length = self._length(request)
        start = self._arena.take(length)
        self.unusable = self._arena.free if start is None and self._arena.free >= length else 0
        if start is None:
            return False
        self._regions[request.name] = (start, length)
        self._top = max(self._top, self.allocated)
        return True

    def grow(self, name: str, tokens: int) -> bool:
        assert tokens <= self._regions[name][1], "longer than reserved"
        return True

    def release(self, name: str) -> None:
        self._arena.give_back(*self._regions.pop(name))

    def take_top(self) -> int:
        top, self._top = max(self._top, self.allocated), self.allocated
        return top


class GrowingMemory:
    """`capacity`: of the new tensor, from the length that no longer fits the old one."""

    def __init__(self, budget: int, capacity: Callable[[int], int]) -> None:
        self._budget = budget
        self._capacity = capacity
        self._held: dict[str, tuple[int, int]] = {}  # (tokens, capacity)
        self._top = 0
        self.allocated = 0
        self.copied = 0
        self.unusable = 0

    def admit(self, request: MixedRequest) -> bool:
        wanted = self._capacity(request.prompt_tokens)
        copy = max([wanted, *(capacity for _, capacity in self._held.values())])
        if self.allocated + wanted + copy > self._budget:  # or the next copy would preempt it at once
            return False
        self._held[request.name] = (request.prompt_tokens, wanted)
        self._allocate(wanted)
        return True

    def grow(self, name: str, tokens: int) -> bool:
        held, capacity = self._held[name]
        if tokens > capacity:
            wanted = self._capacity(tokens)
            if self.allocated + wanted > self._budget:
                return False
            self._allocate(wanted)
            self.copied += held
            self.allocated -= capacity
            capacity = wanted
        self._held[name] = (tokens, capacity)
        return True

    def release(self, name: str) -> None:
        self.allocated -= self._held.pop(name)[1]

    def take_top(self) -> int:
        top, self._top = max(self._top, self.allocated), self.allocated
        return top

    def _allocate(self, tokens: int) -> None:
        self.allocated += tokens
        self._top = max(self._top, self.allocated)
