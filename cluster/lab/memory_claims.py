"""What the memory experiment says about the article's claims.

Owns: MemoryRun, and one claim per statement of sections 1.1, 1.3, 2.2, 2.5 and 4.4.
Does not: measure.
Invariants: a verdict is computed from the run, never written down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.lab.findings import Claim, Verdict
from cluster.lab.memory_counts import (
    BLOCK_SIZE,
    GROW_DOUBLE,
    GROW_ONE,
    MAX_MODEL_LEN,
    MODEL_LENGTHS,
    PAGED,
    RESERVE_MAX,
    RESERVE_OWN,
    MemoryCounts,
)
from cluster.lab.memory_drive import DriveRecord
from cluster.lab.memory_speed import SpeedRun

_CLAIMED_SAVING = (0.6, 0.8)
_SEVERAL = 2.0


@dataclass(frozen=True, slots=True)
class MemoryRun:
    """budget: tokens.  tensor_bytes: of the pool.  account_bytes: blocks times bytes per block."""

    counts: MemoryCounts
    speed: dict[str, SpeedRun]
    budget: int
    bytes_per_token: int
    tensor_bytes: int
    account_bytes: int

    def in_mib(self, tokens: float) -> float:
        return round(tokens * self.bytes_per_token / 2**20, 2)

    def mib(self, tokens: float) -> str:
        size = tokens * self.bytes_per_token / 2**20
        return f"{size:.1f}" if size >= 1 else f"{size:.3f}"


def memory_claims(run: MemoryRun) -> tuple[Claim, ...]:
    return tuple(_claims(run))


def _claims(run: MemoryRun) -> Iterator[Claim]:
    yield _inner(run.counts)
    yield _outer(run.counts, run.budget)
    yield _tail(run.counts)
    yield _saving(run.counts)
    yield _throughput(run.speed)
    yield from _two_gains(run)
    yield _counter(run)
    yield _curves(run)
    yield _tensor(run)


def _inner(counts: MemoryCounts) -> Claim:
    reserved, own = (counts.unlimited[name].inner_waste for name in (RESERVE_MAX, RESERVE_OWN))
    return Claim(
        section="1.3",
        claim="Reserving the longest length at the start wastes what a request does not use (inner fragmentation)",
        expected=f"most of {MAX_MODEL_LEN} reserved tokens stay empty",
        measured=f"{reserved:.0%} of the reserved memory held nothing; {own:.0%} with prompt + max_tokens reserved",
        verdict=Verdict.CONFIRMED if reserved > 0.5 else Verdict.DEPENDS,
    )


def _outer(counts: MemoryCounts, budget: int) -> Claim:
    equal, own = counts.budget[RESERVE_MAX], counts.budget[RESERVE_OWN]
    shown = own.steps_with_holes > 0 and equal.steps_with_holes == 0
    return Claim(
        section="1.3",
        claim="Outer fragmentation: enough is free in total and no region is long enough",
        expected="with unlike reservations in one arena; never with equal ones",
        measured=f"in {own.steps_with_holes} of {own.steps} steps somebody waited beside "
        f"{own.mean_unusable / budget:.0%} of "
        f"the memory, free in pieces; equal reservations: {equal.steps_with_holes} of {equal.steps} steps",
        verdict=Verdict.CONFIRMED if shown else Verdict.NOT_CONFIRMED,
    )


def _tail(counts: MemoryCounts) -> Claim:
    paged = counts.unlimited[PAGED]
    worst = max((s.allocated - s.used) / s.running for s in paged.samples if s.running)
    return Claim(
        section="2.2",
        claim="With blocks only the tail of a sequence's last block is wasted, and there is no outer fragmentation",
        expected=f"less than {BLOCK_SIZE} tokens a request",
        measured=f"at most {worst:.1f} tokens a request on average in a step, {paged.inner_waste:.1%} of what is "
        "allocated; "
        f"{counts.budget[PAGED].steps_with_holes} steps with holes",
        verdict=Verdict.CONFIRMED
        if worst < BLOCK_SIZE and counts.budget[PAGED].steps_with_holes == 0
        else Verdict.NOT_CONFIRMED,
    )


def _saving(counts: MemoryCounts) -> Claim:
    low, high = _CLAIMED_SAVING
    least, most = counts.saving_at(MODEL_LENGTHS[0]), counts.saving_at(MODEL_LENGTHS[-1])
    own = 1 - counts.unlimited[PAGED].peak / counts.unlimited[RESERVE_OWN].peak
    inside = low <= least and most <= high
    return Claim(
        section="2.5",
        claim="60 to 80 % less KV memory",
        expected="60 to 80 %",
        measured=f"{counts.saving:.0%} against reserving {MAX_MODEL_LEN}; {least:.0%} to {most:.0%} as the model "
        "allows "
        f"{MODEL_LENGTHS[0]} to {MODEL_LENGTHS[-1]}; {own:.0%} against prompt + max_tokens: it is the ratio of "
        "reserved to real lengths",
        verdict=Verdict.CONFIRMED if inside else Verdict.DEPENDS if most >= low else Verdict.NOT_CONFIRMED,
    )


def _throughput(speed: dict[str, SpeedRun]) -> Claim:
    by_max, by_own = (speed[PAGED].tokens_per_s / speed[name].tokens_per_s for name in (RESERVE_MAX, RESERVE_OWN))
    verdict = Verdict.CONFIRMED if min(by_max, by_own) >= _SEVERAL else Verdict.NOT_CONFIRMED
    if verdict is Verdict.NOT_CONFIRMED and max(by_max, by_own) > 1.1:
        verdict = Verdict.DEPENDS
    return Claim(
        section="2.5",
        claim="Several times the throughput",
        expected=f"at least {_SEVERAL:g} times, in the same memory",
        measured=f"{by_max:.2f} times the tokens/s of reserving the longest length, {by_own:.2f} times of prompt + "
        "max_tokens: as far as this machine gets faster with more requests at once",
        verdict=verdict,
    )


def _two_gains(run: MemoryRun) -> Iterator[Claim]:
    counts, grow = run.counts, run.speed[GROW_ONE]
    paged, reserved = counts.budget[PAGED].mean_running, counts.budget[RESERVE_MAX].mean_running
    yield Claim(
        section="2.5",
        claim="The first gain is capacity: more requests in the same memory",
        expected="more requests at once than with reserved lengths",
        measured=f"{paged:.1f} at once in {run.budget} tokens, instead of {reserved:.1f} (longest length) and "
        f"{counts.budget[RESERVE_OWN].mean_running:.1f} (prompt + max_tokens)",
        verdict=Verdict.CONFIRMED if paged > 1.1 * reserved else Verdict.NOT_CONFIRMED,
    )
    share = grow.copy_s / (grow.copy_s + grow.engine_s)
    yield Claim(
        section="2.5",
        claim="The second gain is time: no copies",
        expected="a cache that grows by concatenation copies what it holds at every token",
        measured=f"{grow.copied_bytes / 2**20:,.0f} MiB copied for {grow.tokens} tokens, {share:.1%} of the run's "
        "time; "
        "neither reserved nor paged memory copies anything",
        verdict=Verdict.CONFIRMED if share >= 0.05 else Verdict.DEPENDS,
    )


def _counter(run: MemoryRun) -> Claim:
    grow = run.counts.unlimited[GROW_ONE].peak
    smallest = run.counts.smallest_pool * BLOCK_SIZE
    return Claim(
        section="2.5, 4.4",
        claim="Compare the peak of the memory counter, with and without paging",
        expected="the paged run's peak is lower",
        measured=f"a pool is allocated at the start, so the counter shows its size, whatever is used: "
        f"{run.mib(smallest)} MiB "
        f"for the smallest pool in which none of these requests waits, beside {run.mib(grow)} MiB (grown by copy) and "
        f"{run.mib(run.counts.unlimited[RESERVE_MAX].peak)} MiB (reserved); a larger pool would look worse and be "
        "better",
        verdict=Verdict.DEPENDS,
    )


def _curves(run: MemoryRun) -> Claim:
    jumps = {name: _jumps(run.counts.alone[name]) for name in (GROW_DOUBLE, PAGED)}
    return Claim(
        section="4.4",
        claim="nvidia-smi shows a saw-tooth for contiguous memory and a smooth rise for paged memory",
        expected="two shapes",
        measured=f"three: one long request that grows by copy needs {run.mib(jumps[GROW_DOUBLE])} MiB more within "
        f"a step than after it, blocks in use {run.mib(jumps[PAGED])} MiB more; but a real pool is one allocation of "
        f"{run.tensor_bytes / 2**20:.1f} MiB that never changes, so nvidia-smi is flat: look at blocks in use instead",
        verdict=Verdict.DEPENDS if jumps[GROW_DOUBLE] > jumps[PAGED] else Verdict.NOT_CONFIRMED,
    )


def _jumps(record: DriveRecord) -> int:
    """The most, in tokens, that existed within a step and not after it."""
    return max(sample.top - sample.allocated for sample in record.samples)


def _tensor(run: MemoryRun) -> Claim:
    equal = run.tensor_bytes == run.account_bytes
    return Claim(
        section="4.3",
        claim="The pool's tensor is blocks times bytes per block",
        expected=f"{run.account_bytes:,} bytes by the account",
        measured=f"{run.tensor_bytes:,} bytes in the tensor",
        verdict=Verdict.CONFIRMED if equal else Verdict.NOT_CONFIRMED,
    )
