"""ContiguousArena: one stretch of KV slots from which regions are taken by first fit.

    [ r1 | free 80 | r3 | free 120 ]     200 free, and no room for 150: outer fragmentation

Owns: the regions and the holes between them.
Does not: know requests (reserved_memory).
Invariants: regions never overlap; neighbouring holes are one; a refused region changes nothing.
"""

from __future__ import annotations

from bisect import insort


class ContiguousArena:
    def __init__(self, size: int) -> None:
        self.size = size
        self._holes: list[tuple[int, int]] = [(0, size)] if size else []  # (start, length), by start

    @property
    def free(self) -> int:
        return sum(length for _, length in self._holes)

    @property
    def largest_hole(self) -> int:
        return max((length for _, length in self._holes), default=0)

    def take(self, length: int) -> int | None:
        """The start of the first hole that is long enough."""
        for index, (start, room) in enumerate(self._holes):
            if room >= length:
                self._holes[index : index + 1] = [(start + length, room - length)] if room > length else []
                return start
        return None

    def give_back(self, start: int, length: int) -> None:
        insort(self._holes, (start, length))
        joined: list[tuple[int, int]] = []
        for hole in self._holes:
            if joined and sum(joined[-1]) == hole[0]:
                joined[-1] = (joined[-1][0], joined[-1][1] + hole[1])
            else:
                joined.append(hole)
        self._holes = joined
