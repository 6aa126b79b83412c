"""What each memory policy makes of the same requests, counted in tokens: no model, no clock.

    unlimited   every request runs when it arrives: how much memory the same work takes
    budget      a fixed amount: how much work fits, and what is wasted while others wait

Owns: the policies under test by name, the two runs, and the search for the smallest pool.
Does not: turn tokens into bytes or judge (memory).
Invariants: every policy gets the same requests in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.lab.memory_drive import DriveRecord, drive
from cluster.lab.memory_policy import GrowingMemory, MemoryPolicy, ReservedMemory
from cluster.lab.mixed_requests import MixedRequest
from cluster.lab.paged_memory import PagedMemory

BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
MODEL_LENGTHS = (256, 512, 1024, 2048, 8192)
ARRIVAL_STEPS = 2
LONG_ONE = MixedRequest("one", prompt_tokens=24, max_tokens=480, answer_tokens=400)

RESERVE_MAX, RESERVE_OWN = "reserve max_model_len", "reserve prompt + max_tokens"
GROW_ONE, GROW_DOUBLE, PAGED = "grow by copy, 1 token", "grow by copy, doubling", "paged"
MakePolicy = Callable[[int], MemoryPolicy]


def doubled(tokens: int) -> int:
    """The next power of two, from 64 on."""
    return max(64, 1 << (tokens - 1).bit_length())


def policies(max_model_len: int = MAX_MODEL_LEN) -> dict[str, MakePolicy]:
    """By name; each takes its budget in tokens."""
    return {
        RESERVE_MAX: lambda budget: ReservedMemory(budget, lambda _: max_model_len),
        RESERVE_OWN: lambda budget: ReservedMemory(budget, lambda request: request.longest),
        GROW_ONE: lambda budget: GrowingMemory(budget, lambda tokens: tokens),
        GROW_DOUBLE: lambda budget: GrowingMemory(budget, doubled),
        PAGED: lambda budget: PagedMemory(budget // BLOCK_SIZE, BLOCK_SIZE),
    }


@dataclass(frozen=True, slots=True)
class MemoryCounts:
    """smallest_pool: blocks with which nobody waits and nobody is preempted.  by_length: tokens reserved at the peak
    of the unlimited run, by max_model_len.  alone: one long request."""

    unlimited: dict[str, DriveRecord]
    budget: dict[str, DriveRecord]
    smallest_pool: int
    by_length: dict[int, int]
    alone: dict[str, DriveRecord]

    @property
    def saving(self) -> float:
        return 1 - self.unlimited[PAGED].peak / self.unlimited[RESERVE_MAX].peak

    def saving_at(self, max_model_len: int) -> float:
        return 1 - self.unlimited[PAGED].peak / self.by_length[max_model_len]


def count_memory(few: Sequence[MixedRequest], many: Sequence[MixedRequest], budget: int) -> MemoryCounts:
    """`few` run without a limit, `many` within `budget` tokens."""
    most = sum(MAX_MODEL_LEN for _ in few)
    unlimited = {name: drive(few, make(most), every=ARRIVAL_STEPS) for name, make in policies().items()}
    within = {name: drive(many, make(budget)) for name, make in policies().items()}
    by_length = {length: unlimited[PAGED].peak_running * length for length in MODEL_LENGTHS}
    alone = {name: drive([LONG_ONE], make(4 * MAX_MODEL_LEN)) for name, make in policies().items()}
    return MemoryCounts(unlimited, within, _smallest_pool(few, unlimited[PAGED]), by_length, alone)


def _smallest_pool(requests: Sequence[MixedRequest], unlimited: DriveRecord) -> int:
    """Upward from what the unlimited run had in use: admission keeps a few blocks free, so a little more is needed."""
    blocks = unlimited.peak // BLOCK_SIZE
    while True:
        record = drive(requests, PagedMemory(blocks, BLOCK_SIZE), every=ARRIVAL_STEPS)
        if record.steps == unlimited.steps and record.preemptions == 0:
            return blocks
        blocks += 1
