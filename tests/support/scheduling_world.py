"""A model-free engine in virtual time, with a view of who waits, is held and runs, for tests of the scheduler.

Owns: the clock, the engine around it, and every batch that ran.
Does not: judge anything but the end of a life (`settled`).
Invariants: time passes in steps only: `step_s` before each of them, and `run_s` while its batch runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import fake_engine as fakes

from cluster.core.request import TokenDelta
from worker.batch import Batch
from worker.frame import EngineCommand, EngineMode
from worker.runner import Sampled
from worker.scheduler import Scheduler
from worker.scheduling.waiting_queue import WaitingQueue


class VirtualClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class SchedulingWorld:
    """`options` as for `make_fake_engine`. The default has no watermark, so that small pools can be filled."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, *, step_s: float = 0.01, **options: Any) -> None:
        self.clock = VirtualClock()
        self.step_s, self.run_s = step_s, 0.0
        self.fake = fakes.make_fake_engine(num_blocks, block_size, clock=self.clock, **{"watermark": 0.0, **options})
        self.num_blocks = num_blocks
        self.batches: list[Batch] = []
        self._run = self.fake.runner.run
        self.fake.runner.run = self._record  # type: ignore[method-assign]

    def add(self, prompt: Sequence[int], max_tokens: int | None = 8, **options: Any) -> str:
        return self.fake.add(list(prompt), max_tokens, **options)

    def cancel(self, request_id: str) -> None:
        self.fake.cancel(request_id)

    def mode(self, mode: EngineMode) -> None:
        self.fake.engine.execute([EngineCommand(mode=mode)])

    def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.clock.now += self.step_s
            self.fake.step()

    def until(self, done: Callable[[], bool], limit: int = 300) -> None:
        for _ in range(limit):
            if done():
                return
            self.steps()
        raise AssertionError(f"not within {limit} steps")

    def finish(self, limit: int = 5000) -> None:
        for _ in range(limit):
            self.steps()
            if not self.fake.engine.has_work:
                return
        raise AssertionError(f"work is left after {limit} steps")

    @property
    def scheduler(self) -> Scheduler:
        return self.fake.engine._scheduler

    @property
    def queue(self) -> WaitingQueue:
        return self.scheduler._queue

    @property
    def waiting(self) -> set[str]:
        """Not held."""
        return {seq.seq_id for seq in self.queue if seq.held_by is None}

    @property
    def held(self) -> set[str]:
        return {seq.seq_id for seq in self.queue if seq.held_by is not None}

    @property
    def running(self) -> list[str]:
        """Requests, in admission order."""
        return list(dict.fromkeys(seq.request.request_id for seq in self.scheduler.running))

    @property
    def step_tokens(self) -> dict[str, int]:
        """Tokens of each sequence in the newest batch."""
        return {seq.seq_id: len(seq.token_ids) for seq in self.batches[-1].seqs}

    @property
    def computed(self) -> int:
        return self.fake.runner.computed_tokens

    @property
    def preemptions(self) -> int:
        return self.scheduler.num_preemptions

    def tokens(self, request_id: str) -> int:
        """Of its first answer, so far."""
        return len(self.fake.answers[request_id])

    def last(self, request_id: str) -> TokenDelta:
        return self.fake.last[request_id]

    def ended(self, *request_ids: str) -> bool:
        return all(request_id in self.fake.last for request_id in request_ids)

    def in_use(self) -> int:
        return self.fake.engine.load().in_use_blocks

    def settled(self) -> None:
        """Nobody is left, and neither are blocks, names or counts of anybody."""
        load = self.fake.engine.load()
        assert (load.in_use_blocks, load.waiting, load.held, load.running) == (0, 0, 0, 0)
        assert load.uncached_tokens == {} and load.free_blocks + load.cached_blocks == self.num_blocks
        assert (len(self.queue), self.queue.num_tokens, self.queue.num_held) == (0, 0, 0)
        assert not self.fake.engine.has_work and not self.scheduler.has_work
        assert self.fake.engine._manager.num_sequences == 0
        assert self.fake.engine.next_deadline is None

    def _record(self, batch: Batch) -> list[Sampled]:
        self.batches.append(batch)
        self.clock.now += self.run_s
        return self._run(batch)
