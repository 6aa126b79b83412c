"""drive: requests through a MemoryPolicy, step by step: admit, give everybody a token, let go of who has ended.

    queue -> admitted in order while the policy has room -> a token a step -> ends, or is preempted when it cannot grow

Owns: the loop, preemption of the newest, and a sample of every step.
Does not: decide what a request occupies (the policy) or compute tokens (the executor).
Invariants: every request ends; the first in the queue is never overtaken, so policies differ only in their room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import NamedTuple, Protocol

from cluster.lab.memory_policy import MemoryPolicy
from cluster.lab.mixed_requests import MixedRequest


class Sample(NamedTuple):
    """After a step, in tokens. top: the most that existed within the step.  unusable: as in MemoryPolicy."""

    running: int
    used: int
    allocated: int
    top: int
    unusable: int


@dataclass(slots=True)
class DriveRecord:
    """generated: tokens.  copied: tokens' worth of KV."""

    samples: list[Sample] = field(default_factory=list)
    generated: int = 0
    preemptions: int = 0
    copied: int = 0

    @property
    def steps(self) -> int:
        return len(self.samples)

    @property
    def peak(self) -> int:
        return max(sample.top for sample in self.samples)

    @property
    def peak_used(self) -> int:
        return max(sample.used for sample in self.samples)

    @property
    def peak_running(self) -> int:
        return max(sample.running for sample in self.samples)

    @property
    def mean_running(self) -> float:
        return mean(sample.running for sample in self.samples)

    @property
    def inner_waste(self) -> float:
        """Share of allocated memory that holds no token, over all steps."""
        return 1 - sum(sample.used for sample in self.samples) / sum(sample.allocated for sample in self.samples)

    @property
    def steps_with_holes(self) -> int:
        """In which somebody waited although enough was free, in pieces."""
        return sum(sample.unusable > 0 for sample in self.samples)

    @property
    def mean_unusable(self) -> float:
        """Over those steps."""
        found = [sample.unusable for sample in self.samples if sample.unusable]
        return mean(found) if found else 0.0


class Executor(Protocol):
    def add(self, request: MixedRequest) -> None: ...

    def cancel(self, name: str) -> None:
        """It may have ended in the last step."""

    def step(self) -> dict[str, int]:
        """New tokens of each request that got any."""


class VirtualExecutor:
    """A token a step for everybody, prompts included in the first."""

    def __init__(self) -> None:
        self._running: dict[str, int] = {}

    def add(self, request: MixedRequest) -> None:
        self._running[request.name] = request.answer_tokens

    def cancel(self, name: str) -> None:
        self._running.pop(name, None)

    def step(self) -> dict[str, int]:
        given = dict.fromkeys(self._running, 1)
        self._running = {name: left - 1 for name, left in self._running.items() if left > 1}
        return given


class _Running:
    def __init__(self, request: MixedRequest) -> None:
        self.request = request
        self.generated = 0

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens + self.generated

    @property
    def ended(self) -> bool:
        return self.generated >= self.request.answer_tokens


def drive(
    requests: Sequence[MixedRequest], policy: MemoryPolicy, executor: Executor | None = None, *, every: int = 0
) -> DriveRecord:
    """One of them arrives every so many steps; 0: all are in the queue at the start."""
    loop = _Drive(requests, policy, executor or VirtualExecutor(), every)
    while loop.has_work:
        loop.step()
    loop.record.copied = policy.copied
    return loop.record


class _Drive:
    def __init__(self, requests: Sequence[MixedRequest], policy: MemoryPolicy, executor: Executor, every: int) -> None:
        self._policy = policy
        self._executor = executor
        self._every = every
        self._coming = deque(requests)
        self._queue: deque[MixedRequest] = deque()
        self._running: dict[str, _Running] = {}
        self.record = DriveRecord()

    @property
    def has_work(self) -> bool:
        return bool(self._coming or self._queue or self._running)

    def step(self) -> None:
        policy, running = self._policy, self._running
        policy.take_top()  # of what has ended since the last sample
        self._arrive()
        unusable = self._admit()
        assert running or not self._queue, f"{self._queue[0].name} does not fit alone"
        for name, count in self._executor.step().items():
            if name in running:  # not preempted by somebody before it
                self._grow(name, count)
        used = sum(one.tokens for one in running.values())
        self.record.samples.append(Sample(len(running), used, policy.allocated, policy.take_top(), unusable))
        for name in [name for name, one in running.items() if one.ended]:
            policy.release(name)
            del running[name]

    def _arrive(self) -> None:
        while self._coming and (not self._every or self.record.steps % self._every == 0):
            self._queue.append(self._coming.popleft())
            if self._every:
                return

    def _admit(self) -> int:
        while self._queue and self._policy.admit(self._queue[0]):
            request = self._queue.popleft()
            self._running[request.name] = _Running(request)
            self._executor.add(request)
        return self._policy.unusable if self._queue else 0

    def _grow(self, name: str, count: int) -> None:
        one = self._running[name]
        one.generated += count
        self.record.generated += count
        while name in self._running and not self._policy.grow(name, one.tokens):
            self._preempt(next(reversed(self._running)))

    def _preempt(self, name: str) -> None:
        self._policy.release(name)
        victim = self._running.pop(name)
        if not victim.ended:  # or its memory was all that it still had
            self._executor.cancel(name)
            self._queue.appendleft(victim.request.resumed(victim.generated))
            self.record.preemptions += 1
